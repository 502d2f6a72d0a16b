"""Converts JSON to requests and results to JSON, without HTTP. The service, the exporter and the load tester use it."""

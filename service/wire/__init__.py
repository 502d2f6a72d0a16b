"""JSON to requests and results to JSON, without HTTP: what the service, the exporter and the load tester share."""

"""Traces: times of the stages of requests. Only `tracer` uses OpenTelemetry, which exports them."""

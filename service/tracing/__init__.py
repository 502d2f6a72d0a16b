"""Traces: what a request did and when, and OpenTelemetry, which sends it on; only `tracer` knows that."""

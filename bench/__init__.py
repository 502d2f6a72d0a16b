"""bert-bench: a load generator for HTTP endpoints, a measurement of the engine throughput, and reports. Other packages do not import it."""

"""bert-bench: the load generator for HTTP endpoints, the throughput of the engine alone, and reports. Neither service nor export imports it."""

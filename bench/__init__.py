"""bert-bench: load over HTTP, the engine's own limit, and reports with plots. Nothing in service or export imports this."""

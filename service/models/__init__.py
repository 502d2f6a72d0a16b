"""Models: each combines a bundle, a tokenizer and an engine. The preparer tokenizes requests before the queue. No HTTP."""

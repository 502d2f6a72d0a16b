"""Models: each combines a bundle, a tokenizer and an engine. Requests are tokenized before the queue. No HTTP."""

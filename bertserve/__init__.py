"""Serves fine-tuned BERT-family encoders: `bert-serve`, `bert-export`, `bert-bench`. The folders are links, so that all import one name."""

"""bert-bench: sends load to a running service, and measures ONNX Runtime without it."""

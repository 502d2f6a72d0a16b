"""Runs encodings as tensors on a device, and predicts the cost of a run. It is the only package that uses onnxruntime."""

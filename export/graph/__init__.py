"""Reads, rewrites and writes ONNX graphs. It does not depend on the model."""

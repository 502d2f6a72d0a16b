"""Encodings to tensors on a device, and what a run costs. The only package that knows onnxruntime."""

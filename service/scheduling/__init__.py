"""Decides which items run next, in which batch and on which thread. It does not depend on tasks, models or ONNX."""

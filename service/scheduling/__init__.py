"""Decides which items run next, in which batch and on which thread. It does not depend on texts, models or ONNX."""

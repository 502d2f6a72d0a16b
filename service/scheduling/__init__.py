"""What runs next, with whom and on which thread. Knows no text, model or ONNX."""

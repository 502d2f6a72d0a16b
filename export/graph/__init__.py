"""Reading, rewriting and writing ONNX graphs. Knows no model."""

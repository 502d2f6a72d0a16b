"""Reading, rewriting and writing ONNX graphs. It does not depend on the model."""

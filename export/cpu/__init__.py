"""The traced graph to what ONNX Runtime's CPU provider runs fastest."""

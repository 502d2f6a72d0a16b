"""One pure file per task: `Request`, `estimate`, `encode`, `decode`. No threads, no clock, no HTTP, no ONNX."""

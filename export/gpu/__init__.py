"""Creates the graphs for CUDA and TensorRT. docs/explanation/graphs.md explains their forms, fp16 and the shape plans."""

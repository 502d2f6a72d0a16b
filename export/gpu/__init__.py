"""The traced graph to what the CUDA and TensorRT providers run fastest."""

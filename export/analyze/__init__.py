"""`bert-export analyze`: measures where inference time goes.

- `sweep` measures a model, and variants with one difference: layers, heads, hidden size, length, precision. `shapes` defines the variants,
  and `timing` runs each graph in its own process.
- `profiling` runs one graph of a bundle under ONNX Runtime's profiler, and assigns each node to a layer.
- `report` shows the results.
"""

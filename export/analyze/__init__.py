"""Where inference time goes: `bert-export analyze`.

- `sweep` measures a model and others that differ from it in one thing: layers, heads, hidden size, length, precision. `shapes` says which,
  and `timing` runs each graph in a process of its own.
- `profiling` runs one graph of a bundle under ONNX Runtime's profiler, and says which layer a node belongs to.
- `report` shows what was found.
"""

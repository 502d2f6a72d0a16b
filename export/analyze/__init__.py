"""Where inference time goes: `bert-export analyze`.

- `sweep` measures a model and others that differ from it in one thing: layers, heads, hidden size, length, precision. `shapes` says which,
  `random_model` and `build` make their graphs, and `timing` runs each in a process of its own.
- `profile` runs one graph of a bundle under ONNX Runtime's profiler, and `layers` says which layer a node belongs to.
- `tables` and `plots` show what was found.
"""

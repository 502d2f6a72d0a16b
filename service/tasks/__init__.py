"""One module per task, without side effects: parameters, body, generator function and TaskSpec.

The names of a task's body and parameters begin with the name of its module: `ClassifyBody`, `TokenClassificationBody`.

A new task needs one module here with a SPEC, one line in `catalog.py`, tests and docs. No threads, no clock, no HTTP, no ONNX.
"""

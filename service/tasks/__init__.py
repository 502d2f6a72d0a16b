"""One file per task, pure: its parameters, body, generator function, tensors, form on the playground and TaskSpec. `catalog` lists them.

A new task is one file here with a SPEC, one line in `catalog.py`, its tests and its docs. No threads, no clock, no HTTP, no ONNX.
"""

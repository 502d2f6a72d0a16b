"""One file per task, pure: its parameters, its body on the wire, its generator function and its TaskSpec. `catalog` lists them.

A new task is one file here with a SPEC, one line in `catalog.py`, its tests and its docs. No threads, no clock, no HTTP, no ONNX.
"""

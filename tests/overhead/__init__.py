"""The cost of layers between callers and the model: loads processes that serve the same model in different ways, in turn.

`PYTHONPATH=tests python -m overhead` runs it. `make compare` compares two commits. Tests use its replicas and its Ray cluster.
"""

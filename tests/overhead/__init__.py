"""Measures the cost of layers between callers and the model: loads processes that serve the same model in different ways, in turn.

`PYTHONPATH=tests python -m overhead` runs the measurement. `make compare` compares two commits. Tests use the replicas and the Ray cluster.
"""

"""The cost of layers between callers and the model: loads processes that serve the same model in different ways, in turn.

`python -m bertserve.bench.overhead` runs it from a checkout, because it needs `deploy/`. It is not part of `bert-bench`, which starts no
services.
"""

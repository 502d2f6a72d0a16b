"""What stands between callers and the model costs: processes that serve the same model in several ways, loaded in turn.

`python -m bertserve.bench.overhead` runs it from a checkout, because it reads `deploy/`. It is not a command of `bert-bench`, which starts nothing.
"""

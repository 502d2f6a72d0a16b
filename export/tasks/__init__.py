"""One module per task that a bundle can have; its `EXPORT_TASK` has all the exporter's facts about the task. `all_tasks` lists them.

These modules do not import torch, because `bert-export verify` runs in the service's environment. Functions on a PyTorch model get it as an
argument.
"""

"""Checks of a finished bundle. Without a checkpoint they need no torch, so that they run where the service does.

verify ──► graph_checks ──────────────┬──► loaded_graph       check
   ├─────► data_checks ──► agreement ──► dataset
   └─────► checkpoint_checks (torch)          remeasure (torch): `bert-export verify --update`
"""

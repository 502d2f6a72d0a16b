"""One file per task that a bundle can have: all that the exporter knows of the task, in one `ExportTask`. `catalog` lists them.

Nothing here imports torch: `bert-export verify` runs where the service does. What works on a PyTorch model gets it as an argument.
"""

"""bertserve's inference microservice. It imports neither torch nor transformers nor the export package."""

from importlib.metadata import version

__version__ = version("bertserve")

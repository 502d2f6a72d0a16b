"""bertserve's inference service. It does not import torch, transformers or the export package."""

import os
from importlib.metadata import version

__version__ = version("bertserve")

# Official onnxruntime builds send telemetry and store a device id in the user's cache folder. The variable is read once,
# at the first import of the library. Set it to 0 to allow telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The inference threads run in parallel; the tokenizer's own thread pool would compete with them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

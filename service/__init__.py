"""bertserve's inference microservice. It imports neither torch nor transformers nor the export package."""

import os
from importlib.metadata import version

__version__ = version("bertserve")

# Official onnxruntime builds send telemetry and keep a device id in the user's cache folder; the variable is read once,
# when the library is first imported. Who wants it sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Inference threads are the parallelism: the tokenizer's own thread pool would add a hop, and threads that compete with them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

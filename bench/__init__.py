"""bert-bench: sends load to a running service, and measures ONNX Runtime without it."""


class BenchError(Exception):
    """The command cannot run: a flag, a file or an address is wrong. The message is a sentence for the user. Exit code 2."""

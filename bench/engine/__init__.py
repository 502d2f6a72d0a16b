"""The engine limit: what the graph of a model does in a loop, without HTTP, queue, batching or decoding."""

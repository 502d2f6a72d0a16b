"""ASGI alone: the only package that knows FastAPI, statuses and headers."""

"""The HTTP layer: the only package that uses FastAPI, HTTP statuses and headers."""

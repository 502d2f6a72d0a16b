"""The HTTP interface: routes, access, wire formats. The only package that uses FastAPI."""

"""Endpoints under load: their addresses, the requests for them, and what the service behind them says of itself."""

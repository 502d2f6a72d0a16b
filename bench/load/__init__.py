"""The load generator: connections, arrivals and targets."""

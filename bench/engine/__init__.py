"""The engine alone, without a service: what a bundle's graph can do at most."""

"""A graph against its checkpoint: what was compared, and how far apart they were."""

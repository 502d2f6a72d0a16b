"""A finished bundle checked again. Without a checkpoint it needs no torch."""

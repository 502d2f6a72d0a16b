"""Converts texts to token ids, and splits long texts into windows."""

"""Converts texts to token ids, on threads of its own if they are long, and splits long texts into windows."""

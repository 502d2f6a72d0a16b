"""Strings to token ids, and the windows of long texts."""

"""Measurements and their reports: figures, objectives, JSON, a summary for the terminal and an HTML page with plots."""

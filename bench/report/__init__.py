"""Measurements and their reports: metrics, objectives, JSON, a summary for the terminal and an HTML page with plots."""

"""What was measured, as JSON, lines and a page with plots."""

"""Any source of a model to one plain record. All that differs between checkpoints ends here."""

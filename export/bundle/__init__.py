"""What lands on disk: manifest, model card, stored example, and the rename into place."""

"""Models on disk: manifest, graphs, files, and the required validation report. The exporter writes the same format."""

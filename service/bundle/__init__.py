"""What a model is on disk: manifest, graphs, files and the validation report that an operator asks for. Export writes what this reads."""

"""Models and their registry. A model combines a bundle, a tokenizer and an engine; the registry finds it by name or task. No HTTP."""

"""What `--model` names: sources to folders of bundles, exported into a cache where they are checkpoints."""

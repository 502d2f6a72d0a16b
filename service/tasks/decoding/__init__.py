"""What several tasks decode with: activations, offsets in other units, tag schemes, spans. Pure numpy and Python."""

"""What several tasks decode with: activations, offsets in other units, tag schemes. Pure numpy and Python."""

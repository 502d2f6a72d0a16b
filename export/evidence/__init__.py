"""Evidence that a graph answers as its checkpoint does: the manifest holds it, the card shows it, `bert-export verify` repeats it.

measure ──► parity ──► reference ──► samples        latency
               └─► batch_invariance, decisions ──► metrics        predict

`reference` and what stands above it need torch; the others, which `export.verify` uses without a checkpoint, need none.
"""

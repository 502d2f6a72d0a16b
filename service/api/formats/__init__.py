"""One module per wire format: a body becomes a `Call`, and a result becomes the JSON that clients of the format expect."""

"""What is sent: texts of known lengths, in the request bodies of each endpoint."""

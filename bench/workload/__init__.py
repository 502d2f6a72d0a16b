"""What is sent: texts of known lengths in the bodies of each endpoint."""

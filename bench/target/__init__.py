"""The endpoints under load: their addresses, what is sent to them and what they say of themselves."""

"""Request bodies: JSON, the types of their fields, limits, and errors that say what to change. The bodies of tasks are in their modules."""

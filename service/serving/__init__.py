"""The parts put together: a model of a bundle, and the registry that finds models by name and task. No HTTP."""

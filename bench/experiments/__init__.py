"""The measurements behind the subcommands: loads and engine loops in turn, and what they come to."""

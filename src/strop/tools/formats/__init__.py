"""How models write tool calls: one file per format."""

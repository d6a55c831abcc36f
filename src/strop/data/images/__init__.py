"""Images in data: columns and parts of messages that hold them, and a set that is drawn."""

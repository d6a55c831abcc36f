"""Images in data: columns and parts of messages that hold them."""

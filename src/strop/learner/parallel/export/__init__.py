"""The weights of a sharded network on their way to engines."""

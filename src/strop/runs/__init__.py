"""From a configuration to a running system. The only package that knows all others."""

"""From a configuration to a running system. The only package that depends on all others."""

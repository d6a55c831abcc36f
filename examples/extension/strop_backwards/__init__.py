"""An extension of Strop: an environment, a listener with its section of the configuration, and a command."""

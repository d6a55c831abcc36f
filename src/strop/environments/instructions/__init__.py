"""Instructions whose following can be checked."""

"""Device performance, and model costs: no torch, no network."""

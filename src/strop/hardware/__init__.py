"""What devices can do, and what a model asks of them: no torch, no network."""

"""Training of a draft head beside the policy."""

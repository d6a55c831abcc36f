"""A draft head that is trained alongside the policy, for speculative decoding (``policy.draft``, docs/speculation.md)."""

"""A draft head that is trained beside the policy, for speculative decoding (``policy.draft``, docs/speculation.md)."""

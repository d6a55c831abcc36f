"""Speculation with the policy's draft head in the embedded engine."""

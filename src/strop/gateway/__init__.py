"""Agents that were written elsewhere, served by the policy that is trained."""

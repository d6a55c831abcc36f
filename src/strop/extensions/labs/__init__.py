"""Experiments with the policy: each attaches through the seams of ``strop.learner.policy_extension`` and of the layers."""

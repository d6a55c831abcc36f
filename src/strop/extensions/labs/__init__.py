"""Experiments with the policy: each attaches through the seams of ``strop.learner.learner_config`` and of the layers."""

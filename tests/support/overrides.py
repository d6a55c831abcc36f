"""Overrides of the command line."""

from __future__ import annotations

# The least that a run needs: a model, an environment, and no validation.
RUN = [
    "policy.model_name=m",
    "env.arithmetic={}",
    "data.train.env_name=arithmetic",
    "grpo.val_period=0",
    "checkpointing.metric_name=null",
]

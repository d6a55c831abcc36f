"""Section ``megatron_cfg``."""

from __future__ import annotations

from strop.config.recipes.rules import Rule, Unused

MEGATRON_RULES: tuple[Rule, ...] = (Unused("*.megatron_cfg.*", "the Megatron Core learner is not in this version"),)

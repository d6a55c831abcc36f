"""Section ``env``."""

from __future__ import annotations

from strop.config.recipes.rules import Rule

ENVIRONMENT_RULES: tuple[Rule, ...] = ()

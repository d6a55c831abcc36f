"""Rollouts from text, for environments and verifiers of extensions."""

from __future__ import annotations

from support.judged_texts import scored as scored
from support.judged_texts import talk as talk
from support.judged_texts import value as value
from support.written_rollouts import wrote as wrote

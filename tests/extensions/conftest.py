"""Rollouts from text, for environments and verifiers of extensions, and the tiny model of whole runs."""

from __future__ import annotations

from loop.conftest import tiny as tiny
from support.judged_texts import scored as scored
from support.judged_texts import talk as talk
from support.judged_texts import value as value
from support.written_rollouts import wrote as wrote

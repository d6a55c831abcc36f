"""Rollouts from text, for the pages whose examples are tried, and the tiny model of whole runs."""

from __future__ import annotations

from loop.conftest import tiny as tiny
from support.judged_texts import talk as talk
from support.written_rollouts import wrote as wrote

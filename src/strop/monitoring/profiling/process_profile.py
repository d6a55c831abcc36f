"""Profiling calls from outside a process: read its clock, begin, end."""

from __future__ import annotations

import time
from typing import Any

from strop.monitoring.profiling.operator_trace import OperatorTrace
from strop.monitoring.profiling.span_recorder import RECORDER, RecordedSpans

_operators = OperatorTrace()


def control_profile(what: str, operators: bool = False) -> Any:
    """Do one of: ``clock`` (return ``time.perf_counter``), ``begin``, ``end`` (return RecordedSpans)."""
    if what == "clock":
        return time.perf_counter()
    return begin_profile(operators) if what == "begin" else end_profile()


def begin_profile(operators: bool) -> str:
    """Start recording this process. Return why torch's operators are not recorded; empty if they are, or were not requested."""
    problem = ""
    if operators:
        try:
            _operators.begin()
        except (RuntimeError, ImportError, TypeError) as error:  # another profiler, or a torch without these settings
            problem = f"torch's operators are not recorded: {error}"
    RECORDER.begin()
    return problem


def end_profile() -> RecordedSpans:
    """End the recording of this process and return it."""
    return RECORDER.end()._replace(operators=_operators.end())

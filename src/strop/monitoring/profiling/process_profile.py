"""What a process does to be profiled, called from outside: read its clock, begin, end, say how near its operators are to the roof."""

from __future__ import annotations

import time
from typing import Any

from strop.monitoring.profiling.operator_trace import OperatorTrace
from strop.monitoring.profiling.span_recorder import RECORDER, RecordedSpans, Span
from strop.monitoring.roofline.operator_rows import TimedPass
from strop.monitoring.roofline.process_roofline import PASSES, find_ceilings, make_roofline
from strop.monitoring.roofline.step_roofline import ProcessRoofline

KERNELS_TRACK = "kernels"  # spans of calls in which torch sees nothing
PASS_TRACKS = ("learner", "engine", KERNELS_TRACK)

_operators = OperatorTrace()
_spans: list[Span] = []  # of the last recording, for its roofline


def control_profile(what: str, operators: bool = False) -> Any:
    """Do one of: ``clock`` (return ``time.perf_counter``), ``begin``, ``end`` (return RecordedSpans), ``ceilings`` (find the device's,
    which may measure them), ``roofline`` (return the ProcessRoofline of what ended, once)."""
    if what == "clock":
        return time.perf_counter()
    if what == "ceilings":
        return find_ceilings() is not None
    if what == "roofline":
        return take_roofline()
    return begin_profile(operators) if what == "begin" else end_profile()


def begin_profile(operators: bool) -> str:
    """Begin to record this process. Return why torch's operators are not recorded; empty if they are, or were not asked for."""
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
    global _spans
    recorded = RECORDER.end()
    _spans = [span for span in recorded.spans if span.track in PASS_TRACKS or (span.track == "calls" and span.name in PASSES)]
    return recorded._replace(operators=_operators.end())


def take_roofline() -> ProcessRoofline:
    """Return the roofline of the recording that ended, and forget it."""
    global _spans
    events, _operators.events = _operators.events, []
    spans, _spans = _spans, []
    passes = [
        TimedPass(span.name, span.started, span.ended, span.thread, span.track == KERNELS_TRACK, span.detail) for span in spans
    ]
    return make_roofline(events, _operators.shift, passes)

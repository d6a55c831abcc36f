"""What a process says of its operators in a step that was recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from strop.hardware.devices import find_device
from strop.monitoring.roofline.device_ceilings import DeviceCeilings
from strop.monitoring.roofline.measured_ceilings import measure_ceilings
from strop.monitoring.roofline.operator_rows import DEVICE, OperatorRow, TimedPass, list_rows
from strop.monitoring.roofline.step_roofline import PassTotals, ProcessRoofline

PASSES = ("prefill", "decode", "forward", "backward", "step")
DECODED = re.compile(r"([\d,]+) sequences, ([\d,]+) tokens")  # the detail of a decode span


def find_ceilings() -> DeviceCeilings | None:
    """Return the ceilings of what this process computes on: its GPU's of the table, or its processors', measured once."""
    import torch

    if not torch.cuda.is_available():
        return measure_ceilings(torch.get_num_threads())
    device = find_device(torch.cuda.get_device_name())
    return None if device is None else DeviceCeilings.of_device(device)


def make_roofline(events: Sequence[Mapping[str, Any]], shift: float, passes: Sequence[TimedPass]) -> ProcessRoofline:
    """Return the roofline of this process, from torch's events and its own passes (``list_rows``)."""
    rows = list_rows(events, shift, passes)
    return ProcessRoofline(
        ceilings=find_ceilings() if rows else None,
        on_device=any(event.get("cat") in DEVICE for event in events),
        passes=[found for name in PASSES if (found := _sum_pass(name, passes, rows)) is not None],
        rows=rows,
    )


def _sum_pass(name: str, passes: Sequence[TimedPass], rows: Sequence[OperatorRow]) -> PassTotals | None:
    mine = [each for each in passes if each.name == name and not each.is_kernel]
    if not mine:
        return None
    inside = [row for row in rows if row.phase == name]
    decoded = [match for each in mine if (match := DECODED.match(each.detail))]
    sequences, attended = (sum(int(match[place].replace(",", "")) for match in decoded) for place in (1, 2))
    return PassTotals(
        name=name,
        calls=len(mine),
        seconds=sum(each.ended - each.started for each in mine),
        flops=sum(row.flops for row in inside),
        moved=sum(row.moved for row in inside),
        precision=max(inside, key=lambda row: row.flops).precision if inside else "",
        sequences=sequences,
        attended=attended,
    )

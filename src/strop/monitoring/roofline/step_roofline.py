"""The rooflines of a step: for each process its ceilings, its passes and its operators. A JSON file beside the trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from strop.monitoring.roofline.decode_work import DecodeWork
from strop.monitoring.roofline.device_ceilings import DeviceCeilings
from strop.monitoring.roofline.operator_rows import OperatorRow
from strop.monitoring.roofline.operator_work import OUTSIDE
from strop.storage.atomic_file import atomic_write

VERSION = 1
SMALL = 5e-6  # seconds: a call whose work takes less is all start and end
LARGEST_FILE = 64 << 20  # bytes

EntryT = TypeVar("EntryT", OperatorRow, "PassTotals")


@dataclass(frozen=True, kw_only=True)
class PassTotals:
    """Passes of one name in a step: prefill, decode, forward, backward, optimizer step."""

    name: str
    calls: int
    seconds: float  # on the clock, with what is not an operator
    flops: float  # of its operators, or of the model where ``of_model``
    moved: float  # bytes
    precision: str
    sequences: int = 0  # of decode: tokens that were sampled
    attended: int = 0  # of decode: tokens that they attended to
    of_model: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessRoofline:
    """One process of a step."""

    name: str = "driver"
    ceilings: DeviceCeilings | None = None  # None: its device is not in the table
    on_device: bool = False  # seconds are of a GPU's kernels
    passes: Sequence[PassTotals] = ()
    rows: Sequence[OperatorRow] = ()
    note: str = ""  # why there is nothing

    @property
    def operator_seconds(self) -> float:
        """Seconds of its operators, those of all threads."""
        return sum(row.seconds for row in self.rows if row.kind != OUTSIDE)


@dataclass(frozen=True, kw_only=True)
class StepRoofline:
    """All processes of a step."""

    step: int
    seconds: float
    processes: Sequence[ProcessRoofline]


@dataclass(frozen=True)
class RooflinePlace:
    """Where work is under the ceilings of its device."""

    intensity: float  # FLOPs a byte
    rate: float  # FLOPs a second
    bandwidth: float  # bytes a second
    share: float  # of what the device could do: 1 is on the roof
    bound: str  # compute, memory, cache (faster than memory) or small calls; empty where nothing is counted


def find_place(each: OperatorRow | PassTotals, ceilings: DeviceCeilings | None) -> RooflinePlace:
    """Return where an operator or a pass is. Without ceilings there are rates only."""
    seconds = max(each.seconds, 1e-12)
    rate, bandwidth = each.flops / seconds, each.moved / seconds
    intensity = each.flops / each.moved if each.moved else 0.0
    if ceilings is None or not each.moved:
        return RooflinePlace(intensity, rate, bandwidth, 0.0, "")
    least = ceilings.least_seconds(each.flops, each.moved, each.precision)
    by_memory = each.moved / ceilings.bandwidth >= each.flops / ceilings.peak(each.precision)
    share = least / seconds
    if share < 0.5 and least / max(each.calls, 1) < SMALL:
        bound = "small calls"
    elif by_memory:
        bound = "cache" if share > 1 else "memory"
    else:
        bound = "compute"
    return RooflinePlace(intensity, rate, bandwidth, share, bound)


def count_decode(process: ProcessRoofline, work: DecodeWork | None) -> ProcessRoofline:
    """Return a process whose decoding is counted from the model's dimensions: Strop's own kernels are no operators of torch."""
    if work is None:
        return process
    return replace(process, passes=[_count_pass(each, work) if each.sequences else each for each in process.passes])


def _count_pass(each: PassTotals, work: DecodeWork) -> PassTotals:
    return replace(
        each,
        flops=work.count_flops(each.sequences, each.attended),
        moved=work.count_bytes(each.calls, each.sequences, each.attended),
        precision=work.precision,
        of_model=True,
    )


def roofline_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}_roofline.json"


def write_roofline(path: Path, found: StepRoofline) -> None:
    """Write a step's rooflines, whole or not at all. Raises OSError."""
    values = {"version": VERSION, "step": found.step, "seconds": found.seconds}
    processes = [
        {
            "name": each.name,
            "ceilings": None if each.ceilings is None else each.ceilings.to_dict(),
            "on_device": each.on_device,
            "note": each.note,
            "passes": [asdict(one) for one in each.passes],
            "rows": [asdict(row) for row in each.rows],
        }
        for each in found.processes
    ]
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({**values, "processes": processes}, allow_nan=False), encoding="utf-8")


def read_roofline(path: Path) -> StepRoofline:
    """Read a step's rooflines. Raises OSError, and ValueError for a file that holds something else."""
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has more than {LARGEST_FILE >> 20} MiB: it is no roofline that Strop wrote")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["version"] != VERSION:
            raise ValueError(
                f"{path} is of another version of Strop: found format {values['version']}, and this one reads {VERSION}"
            )
        processes = tuple(_read_process(each) for each in values["processes"])
        return StepRoofline(step=int(values["step"]), seconds=float(values["seconds"]), processes=processes)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _read_process(values: Mapping[str, Any]) -> ProcessRoofline:
    ceilings = values["ceilings"]
    return ProcessRoofline(
        name=str(values["name"]),
        ceilings=None if ceilings is None else DeviceCeilings.from_dict(ceilings),
        on_device=bool(values["on_device"]),
        note=str(values["note"]),
        passes=tuple(_read_entry(PassTotals, each) for each in values["passes"]),
        rows=tuple(_read_entry(OperatorRow, each) for each in values["rows"]),
    )


def _read_entry(kind: type[EntryT], values: Mapping[str, Any]) -> EntryT:
    """Return a dataclass of numbers and texts; what a newer version adds is left out."""
    types = {"str": str, "int": int, "float": float, "bool": bool}
    return kind(**{each.name: types[str(each.type)](values[each.name]) for each in fields(kind) if each.name in values})


def list_rooflines(folder: Path) -> list[int]:
    """Return the steps of a folder of profiles that have rooflines, in order."""
    names = (path.name for path in folder.glob("step_*_roofline.json"))
    return sorted(int(digits) for name in names if (digits := name.split("_")[1]).isdigit())

"""The starts of a run, in two files of its log folder: how it was started, and the settings that it had.

``starts.jsonl`` has a line per start, with command, packages, hardware and content fingerprints. In ``config_history.jsonl`` the first
line has the whole configuration; each start with other settings adds a line with the changes, as {key: [old, new]}; the last line of a
finished run has its step and its end. A resumed run drops the lines of later steps, as it drops their metrics.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from strop import plugins
from strop.storage.files import atomic_write

STARTS_FILE = "starts.jsonl"

# Packages that affect a run's results; other installed ones are left out.
PACKAGES = (
    "strop", "torch", "transformers", "numpy", "vllm", "ray", "peft", "torchao", "triton", "flash-attn",
    "tokenizers", "safetensors", "datasets", "math-verify", "pyarrow",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The environment in which a run was started. Fields missing in older files are read as unknown."""

    after_step: int  # the step after which it continues; 0: from the beginning
    time: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the contents behind names, by key


def record_run_start(folder: Path, start: RunStart) -> None:
    """Append a line. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / STARTS_FILE).open("a", encoding="utf-8", errors="replace") as file:
        file.write(json.dumps(asdict(start), ensure_ascii=False) + "\n")


def read_run_starts(folder: Path) -> list[RunStart]:
    """Return the starts of a run, oldest first; empty for a run of an older version. Unreadable lines are skipped."""
    try:
        lines = (folder / STARTS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    known = {each.name for each in fields(RunStart)}
    return [RunStart(**{name: value for name, value in row.items() if name in known}) for row in _parse(lines)]


def _parse(lines: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # cut short by a full disk or a kill
            continue
        if isinstance(row, dict) and "after_step" in row:
            rows.append(row)
    return rows


def format_now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect a run's results."""
    names = (*PACKAGES, *plugins.declared("engines"), *_list_learner_packages())
    versions = {name: version for name in names if (version := _find_version(name)) is not None}
    return {"python": platform.python_version(), **versions}


def _list_learner_packages() -> Iterator[str]:
    """Yield the packages that bring learners, and those that the extra of a learner's name installs."""
    for name, point in plugins.declared("learners").items():
        package = plugins.package_of(point)
        yield package
        with suppress(importlib.metadata.PackageNotFoundError):
            required = importlib.metadata.requires(package) or ()
            yield from (re.split(r"[^\w.-]", each)[0] for each in required if f'extra == "{name}"' in each)


@functools.cache  # cached, because the library parses all of a package's metadata
def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_hardware() -> dict[str, str]:
    """Return this process's hardware: processor, cores, threads, memory, system, and GPUs with their memory and driver's runtime."""
    torch = sys.modules.get("torch")  # not imported for this
    found = {
        "processor": find_processor(),
        "threads": "" if torch is None else str(torch.get_num_threads()),
        "cores": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} of {os.cpu_count()}",
        "memory": _find_memory(),
        "system": f"{platform.system()} {platform.release()}",
        "GPUs": _describe_gpus(),
    }
    return {name: value for name, value in found.items() if value}


def find_processor() -> str:
    """Return the processor's name for itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _find_memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return ""


def _describe_gpus() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in properties]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return f"{counted}, CUDA {torch.version.cuda}" if torch.version.cuda else counted


HISTORY_FILE = "config_history.jsonl"

# Why a run is finished: its last step, its last task, or a validation metric.
End = Literal["steps", "tasks", "early_stop"]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The end of a run that has nothing left to do."""

    step: int
    end: End
    time: str


def record_start(folder: Path, *, step: int, config: Mapping[str, Any], changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Record the settings of a run that continues after ``step``; -1 or 0 means a new run."""
    lines = [line for line in _read(folder) if line.get("from_step", step + 2) <= step] if step > 0 else []
    if not lines:
        lines = [{"from_step": max(step, 0) + 1, "time": _now(), "config": config}]
    elif changed:
        lines.append({"from_step": step + 1, "time": _now(), "changed": changed})
    _write(folder, lines)


def record_finish(folder: Path, *, step: int, end: End) -> None:
    """Record that the run is finished."""
    lines = [line for line in _read(folder) if "finished" not in line]
    _write(folder, [*lines, {"finished": step, "end": end, "time": _now()}])


def read_finish(folder: Path) -> FinishedRun | None:
    """Return how the run in a log folder finished; None if it did not."""
    lines = _read(folder)
    last = lines[-1] if lines else {}
    return FinishedRun(step=last["finished"], end=last["end"], time=last["time"]) if "finished" in last else None


def read_changes(folder: Path) -> list[tuple[int, Mapping[str, tuple[Any, Any]]]]:
    """Return (first step, {key: (old, new)}) of each start of a run with other settings, in order."""
    lines = [line for line in _read(folder) if "changed" in line]
    return [(int(line["from_step"]), {key: (old, new) for key, (old, new) in line["changed"].items()}) for line in lines]


def read_first_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration that a run began with; empty if it was not recorded."""
    lines = _read(folder)
    return dict(lines[0].get("config", {})) if lines else {}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _read(folder: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (folder / HISTORY_FILE).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _write(folder: Path, lines: list[dict[str, Any]]) -> None:
    with atomic_write(folder / HISTORY_FILE) as temporary:
        temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

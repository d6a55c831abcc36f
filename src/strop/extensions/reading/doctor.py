"""``strop doctor RUN``: diagnose a run from its log folder: its state, its open waits, its errors, and what to do. Read-only."""

from __future__ import annotations

import difflib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.monitoring.console_columns import format_duration
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.monitoring.waits import Status, Wait, process_start_time, read_status
from strop.storage.folder_lock import read_holder

Verdict = Literal["running", "hung", "dead", "finished", "failed", "interrupted", "unknown"]
HEALTHY: frozenset[Verdict] = frozenset({"running", "finished"})
ALIVE: frozenset[Verdict] = frozenset({"running", "hung"})
RECENT_STEPS = 20  # steps searched for errors and mismatch
MAX_WAITS_SHOWN = 40
MISMATCH = "train/token_mult_prob_error"
MISMATCH_WARNING_PREFIX = "warning: mismatch"


class RunNotFound(LookupError):
    """No run was found. The message lists where it was searched."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of ``diagnose``. Durations are in seconds."""

    folder: str
    verdict: Verdict
    why: str
    step: int  # the last logged step; 0: none
    since_step: float | None = None
    doing: str = ""
    waits: tuple[str, ...] = ()  # a tree, one line per wait
    troubles: tuple[str, ...] = ()  # reports of waits over their limits
    error: str | None = None  # as in ``why``
    traceback: str | None = None  # of an error in a user's code
    dropped: tuple[str, ...]  # failed groups of the last steps, and their errors
    mismatch: str | None
    checkpoint: str | None = None  # the newest one
    stacks: str | None = None
    notes: tuple[str, ...] = ()  # the latest notes of the run
    process: str = ""
    advice: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return self.verdict in HEALTHY


def find_run(run: Path) -> Path:
    """Return the log folder for ``run``, which is the folder or a file in it. Raises RunNotFound."""
    for folder in (run, run.parent) if run.is_file() else (run,):
        if (folder / "status.json").is_file() or (folder / METRICS_FILE).is_file():
            return folder
    if not run.exists():
        near = difflib.get_close_matches(run.name, [path.name for path in run.parent.glob("*/")], n=1)
        meant = f"; did you mean {run.parent / near[0]}?" if near else ""
        raise RunNotFound(f"there is no {run}; name a run's log folder (logger.log_dir){meant}")
    run_names = sorted({path.parent.name for name in ("status.json", METRICS_FILE) for path in run.glob(f"*/{name}")})
    hint = f"; there are runs in it: {', '.join(run_names)}" if run_names else ""
    raise RunNotFound(
        f"{run} contains neither status.json nor {METRICS_FILE}, so it is not a run's log folder (logger.log_dir){hint}"
    )


def diagnose(run: Path) -> Diagnosis:
    """Diagnose a run. Raises RunNotFound, or ValueError if a file of the run is malformed."""
    folder = find_run(run)
    status = read_status(folder)
    steps = read_metrics(folder / METRICS_FILE)
    last_step = steps[-1][0] if steps else 0
    dropped, mismatch = describe_dropped_groups(folder, steps), _describe_mismatch(status, steps)
    holder = read_holder(folder)
    if status is None or (holder is not None and (holder.pid, holder.host) != (status.pid, status.host)):
        return Diagnosis(
            folder=str(folder),
            verdict="unknown" if holder is None else "running",
            why=f"{holder} holds the folder"
            if holder is not None
            else "there is no status.json: the run was started with watchdog.enabled=false, or by an older version",
            step=last_step,
            dropped=dropped,
            mismatch=mismatch,
            advice=("check whether its process exists and when metrics.jsonl was last written",),
        )
    verdict, why = find_verdict(status)
    checkpoint = find_newest_checkpoint(status)
    seen = time.time() if verdict in ALIVE else status.written
    return Diagnosis(
        folder=str(folder),
        verdict=verdict,
        why=why,
        step=max(last_step, status.step, 0),
        since_step=None if status.stepped is None else seen - status.stepped,
        doing=status.doing,
        waits=tuple(format_tree(status.waits)),
        troubles=status.troubles,
        error=status.error,
        traceback=status.traceback,
        dropped=dropped,
        mismatch=mismatch,
        checkpoint=checkpoint,
        stacks=status.stacks,
        notes=tuple(f"{time.strftime('%H:%M:%S', time.localtime(note.when))}  {note.text}" for note in status.notes[-5:]),
        process=(
            f"pid {status.pid} on {status.host}, started {_format_time(status.started)}, seen "
            f"{_format_time(status.written)}: {status.command}"
        ),
        advice=tuple(_give_advice(verdict, status, checkpoint)),
    )


def find_verdict(status: Status) -> tuple[Verdict, str]:
    """Derive the verdict and its reason from the status, its age and the process table."""
    if status.state != "running":
        reasons = {"interrupted": "by Ctrl-C or a signal", "finished": "it reached its end"}
        return status.state, status.error or reasons[status.state]
    silence = time.time() - status.written
    fresh = silence < 4 * status.interval + 2
    if status.host == socket.gethostname():
        if not _is_alive(status):
            return "dead", (
                f"its process (pid {status.pid}) died without a final status, about {format_duration(silence)} ago: "
                "it was killed from outside, e.g. by the out-of-memory killer, or the machine went down"
            )
        if not fresh:
            return "hung", (
                f"its process exists, but even its watchdog has been silent for {format_duration(silence)}: "
                "it is stopped, or a call holds the interpreter lock (GIL)"
            )
    elif not fresh:
        return (
            "hung",
            f"no sign of life from {status.host} for {format_duration(silence)}: check there whether pid {status.pid} is running",
        )
    if status.troubles:
        return "hung", status.troubles[0].splitlines()[0]
    return "running", "nothing is over its limit"


def _is_alive(status: Status) -> bool:
    started = process_start_time(status.pid)
    if status.process_started:
        return started == status.process_started
    try:  # no /proc here
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def format_tree(waits: Sequence[Wait]) -> Iterator[str]:
    """Yield a line per wait, indented below its parent, the longest first."""
    numbers = {wait.number for wait in waits}
    children: dict[int | None, list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: -wait.seconds):
        children.setdefault(wait.parent if wait.parent in numbers else None, []).append(wait)

    def lines(parent: int | None, depth: int) -> Iterator[str]:
        for wait in children.get(parent, ()):
            limit = "" if wait.limit is None else f" of {wait.limit:g}"
            detail = f" ({wait.detail})" if wait.detail else ""
            over = "  OVER ITS LIMIT" if wait.overdue else ""
            yield f"{'   ' * depth}{wait.who} waits for {wait.on}{detail}: {wait.seconds:.1f}{limit} s{over}"
            yield from lines(wait.number, depth + 1)

    rendered = list(lines(None, 0))
    yield from rendered[:MAX_WAITS_SHOWN]
    if len(rendered) > MAX_WAITS_SHOWN:
        yield f"... and {len(rendered) - MAX_WAITS_SHOWN} more"


def find_newest_checkpoint(status: Status) -> str | None:
    folders = Path(status.checkpoints).glob("step_*") if status.checkpoints else ()
    steps = [int(path.name[5:]) for path in folders if re.fullmatch(r"step_\d+", path.name)]
    return str(Path(status.checkpoints or "") / f"step_{max(steps)}") if steps else None


def describe_dropped_groups(folder: Path, steps: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[str, ...]:
    """Describe how many groups of the last steps failed, with their errors if rollouts are stored."""
    failed = {step: values.get("train/groups_dropped_for_errors", 0.0) for step, values in steps[-RECENT_STEPS:]}
    if not any(failed.values()):
        return ()
    last = max(step for step, count in failed.items() if count)
    errors = dict.fromkeys(_read_errors(folder, last))
    return (
        f"{sum(failed.values()):.0f} groups failed in the last {len(failed)} steps; last in step {last}:",
        *(f"  {error[:300]}" for error in list(errors)[:3]),
    )


def _read_errors(folder: Path, step: int) -> list[str]:
    from strop.monitoring.rollout_store.rollout_store import RolloutStore  # imports torch, so only on demand
    from strop.monitoring.rollout_store.stored_files import DamagedRollouts

    store = RolloutStore(folder, "none")
    try:
        return [record.error for record in store.read(step) if record.error] if step in store.steps() else []
    except DamagedRollouts as error:
        return [str(error)]


def _describe_mismatch(status: Status | None, steps: Sequence[tuple[int, Mapping[str, float]]]) -> str | None:
    """Describe the mismatch: its last value, and the last warning."""
    ratios = [(step, values[MISMATCH]) for step, values in steps[-RECENT_STEPS:] if MISMATCH in values]
    if not ratios:
        return None
    text = f"{MISMATCH} {ratios[-1][1]:.4f} in step {ratios[-1][0]}"
    warnings = [note.text for note in (status.notes if status else ()) if note.text.startswith(MISMATCH_WARNING_PREFIX)]
    return f"{text}\n{warnings[-1]}" if warnings else text


ADVICE_BY_KIND = {
    "environment": "the environment does not answer: read its logs, and give its calls a timeout; "
    "watchdog.environment_seconds sets when the watchdog reports it",
    "generation": "the engine does not answer: check its logs and its device; if a long queue is normal here, raise "
    "watchdog.generation_seconds",
    "training": "the learner does not return: check its device and the other ranks; if steps take this long, "
    "raise watchdog.training_seconds",
    "weight_sync": "the weights do not arrive: check whether the engine's process is alive, and the network",
    "checkpoint": "the checkpoint disk is slow or unavailable: check its file system",
}


def _give_advice(verdict: Verdict, status: Status, checkpoint: str | None) -> Iterator[str]:
    start = f"from {checkpoint}" if checkpoint else "from the beginning (no checkpoint yet)"
    restart = f"start the same command again; it continues {start}"
    if verdict == "hung":
        kinds = dict.fromkeys(wait.kind for wait in status.waits if wait.overdue)
        yield from (ADVICE_BY_KIND[kind] for kind in kinds if kind in ADVICE_BY_KIND)
        if status.stacks is not None:
            yield f"read the stacks of all threads and tasks: {status.stacks}"
        yield f"to end it: kill -INT {status.pid} (kill -KILL {status.pid} if that does nothing); then {restart}"
        yield "set watchdog.stop_after_seconds to end such runs automatically"
    elif verdict == "dead":
        yield "look for the cause in the system log (out of memory?) and in its last output"
        yield restart
    elif verdict == "failed":
        yield f"fix the error, then {restart}"
    elif verdict == "interrupted":
        yield restart


def _format_time(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def format_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for all non-empty parts of a diagnosis; a text may have several lines."""
    alive = diagnosis.verdict in ALIVE
    since = (
        "" if diagnosis.since_step is None else f", {format_duration(diagnosis.since_step)} {'ago' if alive else 'before that'}"
    )
    rows = {
        "run": diagnosis.folder,
        "state": f"{diagnosis.verdict}: {diagnosis.why}",
        "last step": f"{diagnosis.step}{since}" if diagnosis.step else "none yet",
        "doing": diagnosis.doing if alive or diagnosis.verdict == "dead" else "",
        "waits": "\n".join(diagnosis.waits),
        "traceback": diagnosis.traceback or "",
        "over limits": "\n".join(diagnosis.troubles),
        "dropped": "\n".join(diagnosis.dropped),
        "mismatch": diagnosis.mismatch or "",
        "checkpoint": diagnosis.checkpoint or "none found",
        "stacks": diagnosis.stacks or "",
        "last notes": "\n".join(diagnosis.notes),
        "process": diagnosis.process,
        "what to do": "\n".join(f"- {line}" for line in diagnosis.advice),
    }
    yield from ((label, text) for label, text in rows.items() if text)


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Format a diagnosis as text."""
    lines = []
    for label, text in format_rows(diagnosis):
        first, *rest = text.splitlines()
        lines += [f"{label:<13}{first}", *(f"{'':<13}{line}" for line in rest)]
    return "\n".join(lines)

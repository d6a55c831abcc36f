"""Runs over streams of many rows, of which they train on few: every row is read, and ``split_validation_size`` holds most of them out."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from loop.kinds import recorded_config, write_rows
from loop.runs import Running, overrides, start, tiny_config

Section = Literal["sft", "grpo"]
Shape = Literal["class", "jsonl", "parquet"]


class MadeUp:
    """Sums, made while they are read, with a state to continue from. A data set class by its path."""

    def __init__(self, rows: int) -> None:
        self.rows, self.first = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.first, self.rows):
            self.next = number + 1
            yield make_row(number)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["next"]


def make_row(number: int) -> dict[str, Any]:
    return {"problem": f"{number}+{number % 97}=", "answer": str(number + number % 97)}


@dataclass(frozen=True, kw_only=True)
class LongStream:
    """A stream of ``rows`` rows, ``kept`` of which (about) a run trains on, in ``steps`` steps."""

    section: Section
    rows: int
    kept: int
    steps: int
    shape: Shape = "class"

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write the rows, eight files of them unless a class makes them, and return the keys of the data."""
        write_rows(folder / "few.jsonl", [make_row(number) for number in range(4)])
        keys = {
            "data.train.streaming": True,
            "data.train.shuffle_buffer": max(16, self.kept // 50),
            "data.train.input_key": "problem",
            "data.train.output_key": "answer",
            "data.train.split_validation_size": 1 - self.kept / self.rows,
            "data.validation.dataset_name": str(folder / "few.jsonl"),
            "data.validation.input_key": "problem",
            "data.validation.output_key": "answer",
        }
        if self.shape == "class":
            return {**keys, "data.train.dataset_name": f"{__file__}:MadeUp", "data.train.dataset_kwargs": {"rows": self.rows}}
        shard = -(-self.rows // 8)
        for number, first in enumerate(range(0, self.rows, shard)):
            numbers = range(first, min(self.rows, first + shard))
            _write_shard(folder / "shards" / f"{number}.{self.shape}", numbers)
        return {**keys, "data.train.dataset_name": str(folder / "shards" / f"*.{self.shape}")}

    def start(self, model: Path, folder: Path, keys: Mapping[str, Any]) -> Running:
        """Start a run of one epoch in ``folder``."""
        each = self.kept // self.steps
        config = tiny_config(model) if self.section == "grpo" else recorded_config("sft", model)
        config |= {
            f"{self.section}.max_num_epochs": 1,
            f"{self.section}.max_num_steps": -1,
            f"{self.section}.val_period": 0,
            "checkpointing.save_period": max(1, self.steps // 10),
            "checkpointing.metric_name": None,
            "checkpointing.keep_top_k": 1,
            "logger.rollouts": "none",
            **(_grpo_keys(each) if self.section == "grpo" else {"policy.train_global_batch_size": each}),
            **keys,
        }
        return start([self.section, *overrides(config)], folder)


def _grpo_keys(prompts: int) -> Mapping[str, Any]:
    return {
        "grpo.num_prompts_per_step": prompts,
        "grpo.num_generations_per_prompt": 4,
        "data.train.env_name": ...,
        "data.validation.env_name": ...,
        "data.validation.size": ...,
        "env.arithmetic.max_operand": ...,
        "env.arithmetic.wording": ...,
        "env.mine.reward": f"{__file__}:digits",
    }


def digits(task: Any, rollout: Any) -> float:
    return sum(each.isdigit() for each in rollout.text) / 4


def _write_shard(path: Path, numbers: Sequence[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(make_row(number)) + "\n" for number in numbers)
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([make_row(number) for number in numbers])
    pyarrow.parquet.write_table(table, path, row_group_size=10_000)


@dataclass(frozen=True)
class Watched:
    """A run that was watched: its exit code, and its resident memory (MiB) at each step that it has logged."""

    code: int
    memory: Mapping[int, float]

    def compare(self) -> tuple[float, float]:
        """Return the largest memory in the second tenth of the steps, and in the last: in the first, the run warms up."""
        steps = sorted(self.memory)
        tenth = max(1, len(steps) // 10)
        early, late = steps[tenth : 2 * tenth], steps[-tenth:]
        return max(self.memory[step] for step in early), max(self.memory[step] for step in late)


def watch(running: Running, *, kill_at: int | None = None, timeout: float = 3600) -> Watched:
    """Wait for the end of a run, or kill it (SIGKILL) once it has logged the step ``kill_at``."""
    assert running.process.pid is not None
    process, logs = psutil.Process(running.process.pid), running.folder / "logs" / "metrics.jsonl"
    memory: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    while running.process.is_alive() and time.monotonic() < deadline:
        step = _last_step(logs)
        try:
            memory[step] = max(memory.get(step, 0.0), process.memory_info().rss / 2**20)
        except psutil.NoSuchProcess:
            break
        if kill_at is not None and step >= kill_at:
            os.kill(running.process.pid, signal.SIGKILL)
        time.sleep(0.1)
    memory.pop(0, None)
    return Watched(running.finish().code, memory)


def _last_step(logs: Path) -> int:
    if not logs.exists():
        return 0
    with logs.open("rb") as file:
        file.seek(max(0, logs.stat().st_size - 65536))
        lines = [line for line in file.read().split(b"\n")[:-1] if line.endswith(b"}")]
    for line in itertools.islice(reversed(lines), 2):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0

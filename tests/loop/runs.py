"""Complete runs of the ``strop`` command on the tiny model, each in its own process that can be killed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.forks import forks

NOT_REPEATABLE = ("timing/", "performance/", "perf/", "system/")  # and all metrics in seconds


def tiny_config(model: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run that takes seconds: six steps of four sums, eight rollouts each.

    ``changes`` are complete dotted keys, with ``__`` for dots.
    """
    settings: dict[str, Any] = {
        "policy.model_name": str(model),
        "policy.max_total_sequence_length": 64,
        "policy.train_micro_batch_size": 4,
        "policy.precision": "float32",
        "policy.device": "cpu",
        "policy.num_threads": 1,
        "policy.optimizer.kwargs.lr": 0.003,
        "policy.generation.max_new_tokens": 4,
        "policy.generation.torch_cfg.kv_cache_memory_gb": 0.01,
        "data.max_input_seq_length": 60,
        "data.train.env_name": "arithmetic",
        "data.validation.env_name": "arithmetic",
        "data.validation.size": 8,
        "env.arithmetic.max_operand": 3,
        "env.arithmetic.wording": "{expression}=",
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 8,
        "grpo.max_num_steps": 6,
        "grpo.max_num_epochs": None,
        "grpo.val_period": 1,
        "checkpointing.checkpoint_dir": "results",
        "checkpointing.metric_name": "val:accuracy",
        "checkpointing.keep_top_k": 1,
        "checkpointing.save_period": 2,
        "logger.log_dir": "logs",
        "logger.console": "none",
    }
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def overrides(settings: dict[str, Any]) -> list[str]:
    """Format settings as command-line overrides; ``...`` omits a setting."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not ...]


@dataclass(frozen=True)
class Outcome:
    code: int  # exit code, or the negative signal number
    out: str
    err: str


@dataclass
class Running:
    """A started run; ``finish`` waits for its end."""

    process: Any
    folder: Path

    def finish(self, timeout: float = 120) -> Outcome:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"the run did not end within {timeout} s:\n{(self.folder / '.err').read_text()}")
        return Outcome(self.process.exitcode, (self.folder / ".out").read_text(), (self.folder / ".err").read_text())


def start(arguments: Sequence[str], folder: Path, *, before: Callable[[], None] | None = None) -> Running:
    """Start ``strop ARGUMENTS`` or ``python SCRIPT.py ARGUMENTS`` in ``folder``. The new process calls ``before`` first."""
    if find_spec("strop.extensions") is None and arguments[0] not in ("grpo", "ppo") and not arguments[0].endswith(".py"):
        pytest.skip(f"strop {arguments[0]} is an extension's")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (".out", ".err"):  # a run may be killed before it opens them
        (folder / name).touch()
    process = forks().Process(target=_main, args=(list(arguments), str(folder), before))
    process.start()
    return Running(process, folder)


def strop(*arguments: str, folder: Path, before: Callable[[], None] | None = None, timeout: float = 120) -> Outcome:
    return start(arguments, folder, before=before).finish(timeout)


def grpo(model: Path, folder: Path, *, before: Callable[[], None] | None = None, **changes: Any) -> Outcome:
    """Run ``strop grpo`` with the tiny settings."""
    return strop("grpo", *overrides(tiny_config(model, **changes)), folder=folder, before=before)


def _main(arguments: list[str], folder: str, before: Callable[[], None] | None) -> None:
    os.chdir(folder)
    for descriptor, name in ((1, ".out"), (2, ".err")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    if before is not None:
        before()
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv = ["strop", *arguments]
    from strop.cli import main

    sys.exit(main(arguments))


@dataclass(frozen=True)
class Environ:
    """For ``before``: set environment variables. (``before`` must be importable in the new process; test modules are not.)"""

    variables: dict[str, str]

    def __call__(self) -> None:
        os.environ.update(self.variables)


def heed_interrupts() -> None:
    """For ``before``: restore the Ctrl-C handler, which children of a background test runner would inherit as ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the lines of metrics.jsonl by step."""
    from strop.monitoring.trackers.jsonl import read_metrics

    lines = read_metrics(folder / "metrics.jsonl")
    assert [step for step, _ in lines] == sorted({step for step, _ in lines}), "each step occurs once, in order"
    return dict(lines)


def repeatable(metrics: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Return the metrics without timings."""
    return {
        step: {name: value for name, value in line.items() if not name.startswith(NOT_REPEATABLE) and "seconds" not in name}
        for step, line in metrics.items()
    }

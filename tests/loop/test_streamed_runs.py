"""Whole runs on data that is streamed: killed and resumed they end as if nothing had happened; workers and threads change nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from loop import long_streams
from loop.killing import Kill
from loop.kinds import SUMS, assert_same_run, conversation, preference, start_run, train, train_to_end, write_rows
from loop.runs import grpo, heed_interrupts, metrics_of, repeatable
from support.forked_interpreter import Forked
from support.sweep import sweep

pytestmark = pytest.mark.slow

STREAMED: Mapping[str, Any] = {"data.train.dataset_name": "shards", "data.train.streaming": True, "data.train.shuffle_buffer": 5}
GRPO: Mapping[str, Any] = {
    **STREAMED,
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "env.mine.reward": "rewards.py:digits",
    "data.train.env_name": ...,
    "data.validation.env_name": ...,
    "data.validation.size": 6,
    "data.validation.streaming": True,
    "data.validation.dataset_name": "shards",  # prompts of the training: what the engine caches of them must not outlive a validation
}


def write_shards(folder: Path, kind: str) -> None:
    """Write 16 rows in three shards of 5, 1 and 10."""
    make = {"sft": conversation, "dpo": preference, "grpo": lambda a, b: {"problem": f"{a}+{b}=", "answer": str(a + b)}}[kind]
    rows = [make(*pair) for pair in SUMS]
    for number, (start, end) in enumerate(((0, 5), (5, 6), (6, 16))):
        write_rows(folder / "shards" / f"{number}.jsonl", rows[start:end])
    (folder / "rewards.py").write_text(
        "def digits(task, rollout):\n    return sum(each.isdigit() for each in rollout.text) / 4\n"
    )


KILLED: Mapping[str, tuple[str, Mapping[str, Any], list[Kill]]] = {
    "sft in workers": ("sft", {"data.num_workers": 2, "data.prefetch": 7}, [Kill("at the optimizer step", 4)]),
    "dpo in a thread": ("dpo", {"data.num_workers": 0}, [Kill("at the optimizer step", 3), Kill("at a save", 2)]),
    "kto, in order": ("dpo", {"algorithm.name": "kto", "data.shuffle": False, "data.prefetch": 0}, [Kill("at the log", 3)]),
    "grpo": ("grpo", GRPO, [Kill("at the optimizer step", 4)]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_ends_as_if_nothing_had_happened(name: str, interpreter: str, tiny: Path, tmp_path: Path) -> None:
    section, changes, kills = KILLED[name]
    run = {"grpo": lambda folder, **more: grpo(tiny, folder, **more)}.get(
        section, lambda folder, **more: train(section, tiny, folder, **more)
    )
    options = {**STREAMED, **changes, "checkpointing.keep_top_k": None}
    for folder in ("whole", "parts"):
        write_shards(tmp_path / folder, section)
    whole = run(tmp_path / "whole", before=Forked(interpreter), **options)
    assert whole.code == 0, whole.err
    for kill in kills:
        outcome = run(tmp_path / "parts", before=Forked(interpreter, then=kill), **options)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    rest = run(tmp_path / "parts", before=Forked(interpreter), **options)
    assert rest.code == 0, rest.err
    assert "no worker could start" not in whole.out + whole.err + rest.out + rest.err
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("section", sweep(["sft", "dpo"]))
def test_what_is_tokenized_ahead_is_what_the_loop_itself_would_make(
    section: str, interpreter: str, tiny: Path, tmp_path: Path
) -> None:
    found = []
    for name, changes in {"loop": {"data.prefetch": 0}, "thread": {}, "workers": {"data.num_workers": 1}}.items():
        shorter = {f"{section}.max_num_steps": 3, **changes}
        output = train_to_end(section, tiny, tmp_path / name, before=Forked(interpreter), **shorter)
        assert "no worker could start" not in output
        found.append(repeatable(metrics_of(tmp_path / name / "logs")))
    assert found[0] == found[1] == found[2] and found[0]


def test_epochs_end_a_streamed_run(tiny: Path, tmp_path: Path) -> None:
    write_shards(tmp_path, "sft")
    epochs = {"sft.max_num_epochs": 2, "sft.max_num_steps": -1, "sft.val_period": 0}
    output = train_to_end("sft", tiny, tmp_path, **{**STREAMED, **epochs})
    assert max(metrics_of(tmp_path / "logs")) == 8 and "examples of a stream to train on" in output


def test_nothing_is_left_of_the_workers_after_ctrl_c(interpreter: str, tiny: Path, tmp_path: Path) -> None:
    changes = {"data.num_workers": 2, "sft.max_num_steps": 10_000, "sft.val_period": 0, "checkpointing.save_period": 10_000}
    running = start_run("sft", tiny, tmp_path, before=Forked(interpreter, then=heed_interrupts), **changes)
    run = psutil.Process(running.process.pid)
    deadline = time.monotonic() + 60
    while not (tmp_path / "logs" / "metrics.jsonl").exists() or not (workers := find_workers(run)):
        assert time.monotonic() < deadline and running.process.is_alive(), (tmp_path / ".err").read_text()
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    assert running.finish().code != 0
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def find_workers(run: psutil.Process) -> list[psutil.Process]:
    return [each for each in run.children(recursive=True) if "tokenizing_pool" in " ".join(each.cmdline())]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", ["class", "jsonl", "parquet"])
@pytest.mark.parametrize("section", ["sft", "grpo"])
def test_a_long_stream_is_trained_on_in_bounded_memory_and_resumed_after_a_kill(
    section: long_streams.Section, shape: long_streams.Shape, tiny: Path, tmp_path: Path
) -> None:
    stream = long_streams.LongStream(section=section, shape=shape, rows=200_000, kept=400, steps=40)
    keys = stream.write(tmp_path)
    whole = long_streams.watch(stream.start(tiny, tmp_path / "whole", keys))
    assert whole.code == 0, (tmp_path / "whole" / ".err").read_text()
    early, late = whole.compare()
    assert late < early + 50  # MiB; all rows as Python objects are about 90
    assert long_streams.watch(stream.start(tiny, tmp_path / "parts", keys), kill_at=15).code == -signal.SIGKILL
    rest = long_streams.watch(stream.start(tiny, tmp_path / "parts", keys))
    assert rest.code == 0, (tmp_path / "parts" / ".err").read_text()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

"""Memory of a streamed set, whole runs on one, and what tokenizing costs the training loop.

    python benchmarks/data_loading.py memory [--rows 10000000] [--block 10000]
    python benchmarks/data_loading.py train [--section sft] [--shape class] [--rows 10000000] [--kept 10000] [--steps 200]
    python benchmarks/data_loading.py waiting [--model NAME] [--steps 8] [--rounds 3] [--turns 30] [--batch 8]

``memory`` reads every row of a made-up set in the blocks of a run, makes a task of each --stride-th, prints the resident memory on
the way, and continues from a state near its end.
``train`` trains a tiny model (two layers) for one epoch of such a set, which a class makes or eight files hold: every row is read, all but
--kept of them are held out. It prints the resident memory at early and at late steps; then it does so again in another folder, kills that
run (SIGKILL) half way, continues it, and compares metrics, weights, optimizer and position.
``waiting`` trains on long conversations, in turns: tokenized by the loop, by a thread, and by two processes; it prints the share of a step
that the loop waits for groups (timing/train/generation).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from common import MODEL, memory, spread, table

from loop.kinds import assert_same_run
from loop.long_streams import LongStream, watch
from loop.runs import metrics_of
from loop.tiny import build_tiny

MODES: Mapping[str, Mapping[str, int]] = {
    "the loop": {"data.prefetch": 0},
    "a thread": {"data.num_workers": 0},
    "2 processes": {"data.num_workers": 2},
}


class MadeUp:
    """Sums, made while they are read, with a state to continue from."""

    def __init__(self, rows: int) -> None:
        self.rows, self.first = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.first, self.rows):
            self.next = number
            question = f"What is {self.next} + {self.next % 97}? Think step by step."
            yield {"problem": question, "answer": str(self.next + self.next % 97)}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["next"]


def measure_memory(rows: int, block: int, stride: int) -> None:
    from strop.data.sources.source import DataSource
    from strop.extensions.math.math_environment import MathEnvironment

    source = DataSource(rows=MadeUp(rows), streaming=True, shuffle=True, shuffle_buffer=block)  # type: ignore[arg-type]
    tasks: Any = MathEnvironment().tasks(source)
    started, lines = time.perf_counter(), []
    for position in range(stride - 1, rows, stride):
        task = tasks[position]
        if (position + 1) % (rows // 10) == 0:
            seconds = time.perf_counter() - started
            lines.append([f"{position + 1:,}", f"{memory('VmRSS'):.1f}", f"{(position + 1) / seconds:,.0f}"])
            print(*lines[-1], flush=True)
    print(table(["rows", "resident memory (MiB)", "rows/s"], lines), flush=True)
    state = json.dumps(tasks.state())
    rest: Any = MathEnvironment().tasks(source)
    rest.load_state(json.loads(state))
    started = time.perf_counter()
    assert rest[rows - 1].id == task.id
    print(f"state of {len(state):,} bytes; the last row after a restart in {time.perf_counter() - started:.2f} s")


def measure_training(stream: LongStream) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, keys = build_tiny(folder / "model"), stream.write(folder)
        started = time.perf_counter()
        whole = watch(stream.start(model, folder / "whole", keys))
        seconds = time.perf_counter() - started
        assert whole.code == 0, (folder / "whole" / ".err").read_text()
        early, late = whole.compare()
        steps = max(metrics_of(folder / "whole" / "logs"))
        speed = f"{seconds:.0f} s, {stream.rows / seconds:,.0f} rows/s"
        print(f"{stream.section} on {stream.rows:,} rows ({stream.shape}), {steps} steps: {speed}")
        print(f"resident memory: {early:.1f} MiB in the second tenth of the steps, {late:.1f} in the last", flush=True)
        killed = watch(stream.start(model, folder / "parts", keys), kill_at=steps // 2)
        assert killed.code == -signal.SIGKILL, killed
        started = time.perf_counter()
        rest = watch(stream.start(model, folder / "parts", keys))
        assert rest.code == 0, (folder / "parts" / ".err").read_text()
        assert_same_run(folder / "parts", folder / "whole")
        seconds = time.perf_counter() - started
        print(
            f"killed after step {max(killed.memory)} and continued ({seconds:.0f} s): metrics, weights, optimizer and position are equal"
        )


def write_conversations(path: Path, rows: int, turns: int) -> None:
    words = ["the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as", "his"]
    choose = random.Random(0)

    def say(count: int) -> str:
        return " ".join(choose.choices(words, k=count))

    with path.open("w") as file:
        for _ in range(rows):
            messages = [{"role": role, "content": say(40)} for _ in range(turns) for role in ("user", "assistant")]
            file.write(json.dumps({"messages": messages}) + "\n")


def measure_waiting(model: str, steps: int, rounds: int, turns: int, batch: int, device: str) -> None:
    from strop.cli import main
    from strop.monitoring.trackers.jsonl import read_metrics

    found: dict[str, list[list[Mapping[str, float]]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        write_conversations(Path(folder) / "rows.jsonl", batch * (steps + 2), turns)
        for number in range(rounds):
            for mode, keys in list(MODES.items())[:: 1 if number % 2 == 0 else -1]:
                logs = Path(folder) / f"{number}-{mode}"
                settings = {
                    "policy.model_name": model,
                    "policy.device": device,
                    "policy.max_total_sequence_length": 8192,
                    "policy.train_global_batch_size": batch,
                    "data.train.dataset_name": f"{folder}/rows.jsonl",
                    "sft.max_num_steps": steps,
                    "sft.val_period": 0,
                    "checkpointing.enabled": False,
                    "logger.log_dir": str(logs),
                    "logger.console": "none",
                    **keys,
                }
                assert main(["sft", *(f"{key}={json.dumps(value)}" for key, value in settings.items())]) == 0
                found[mode].append([line for step, line in read_metrics(logs / "metrics.jsonl") if step > 1])
    lines = []
    for mode, runs in found.items():
        waits = [line["timing/train/generation"] for run in runs for line in run]
        shares = [line["timing/train/generation"] / line["timing/train/total_step_time"] for run in runs for line in run]
        lines.append(
            [mode, f"{1000 * median(waits):.1f}", f"{100 * median(shares):.2f} %", str(spread(100 * each for each in shares))]
        )
    print(table(["tokenized by", "waiting, ms a step", "share of a step", "spread of the share, %"], lines), flush=True)
    base = [median(line["timing/train/generation"] for line in run) for run in found["the loop"]]
    for mode in list(MODES)[1:]:
        own = [median(line["timing/train/generation"] for line in run) for run in found[mode]]
        print(f"{mode}: waits {spread(a / b for a, b in zip(own, base, strict=True))} times as long as the loop tokenizes")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "train", "waiting"])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--block", type=int, default=10_000)
    parser.add_argument("--stride", type=int, default=100, help="of all rows that are read, how many become one task")
    parser.add_argument("--section", choices=["sft", "grpo"], default="sft")
    parser.add_argument("--shape", choices=["class", "jsonl", "parquet"], default="class")
    parser.add_argument("--kept", type=int, default=10_000, help="of all rows that are read, how many are trained on")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, help="default: 200 of train, 8 of waiting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.what == "memory":
        measure_memory(given.rows, given.block, given.stride)
    elif given.what == "train":
        options = {"rows": given.rows, "kept": given.kept, "steps": given.steps or 200}
        measure_training(LongStream(section=given.section, shape=given.shape, **options))
    else:
        measure_waiting(given.model, given.steps or 8, given.rounds, given.turns, given.batch, given.device)


if __name__ == "__main__":
    run()

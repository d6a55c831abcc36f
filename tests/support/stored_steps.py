"""Runs whose rollouts are written directly, for what reads them: no model, no training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore

GROUPS, SAMPLES = 2, 3
HTML = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"


def make_stored(step: int, group: int, sample: int, **changes: Any) -> RolloutRecord:
    """A rollout of two sampled tokens, one of a tool, and as many sampled ones again as its sample; its reward is sample / 10."""
    sampled = (True, True, False, *(True,) * sample)
    turns = (
        TurnRecord(
            role="assistant", text=f"step {step} says {group}.{sample} ", start=0, end=2, sampled=True, versions=(step - 1,)
        ),
        TurnRecord(role="tool", text="tool", start=2, end=3, sampled=False, versions=(), tool="calculator"),
        TurnRecord(role="assistant", text=" done", start=3, end=3 + sample, sampled=True, versions=(step - 1,)),
    )
    record = RolloutRecord(
        step=step, group=group, environment="arithmetic", task_id=f"sum:{group}/a", sample=sample, prompt="<user>1 + 1?",
        completion="".join(turn.text for turn in turns), prompt_tokens=(1, 2), tokens=tuple(range(10, 13 + sample)), sampled=sampled,
        sampler_logprobs=tuple(-0.5 if each else 0.0 for each in sampled),
        learner_logprobs=tuple(-0.25 if each else 0.0 for each in sampled),
        versions=tuple(step - 1 if each else -1 for each in sampled), advantage=float(sample - 1), reward=sample / 10,
        rewards={"correct": sample / 10}, ending="length" if sample == 2 else "stop", error=None, kept=True, dropped_because=None,
        answer="2", prompt_messages=({"role": "user", "content": "1 + 1?"},), turns=turns, metrics={"digits": 1.0},
    )  # fmt: skip
    return replace(record, **changes)


def write_stored_run(folder: Path, steps: int = 3, *, text: str = "") -> Path:
    """Write a log folder with metrics, a configuration, rollouts and one validation. ``text`` is added to each completion."""
    store = RolloutStore(folder)
    for step in range(1, steps + 1):
        records = [make_stored(step, group, sample) for group in range(GROUPS) for sample in range(SAMPLES)]
        store.write(step, [replace(record, completion=record.completion + text) for record in records])
    settings = (
        "policy:\n  precision: float32\ngrpo:\n  seed: 7\n  max_num_steps: 5\ncluster:\n  env_vars:\n    HF_TOKEN: hidden\n"
    )
    (folder / "config.yaml").write_text(settings)
    write_steps(folder, range(1, steps + 1))
    turn = {"role": "assistant", "text": f"4{text}", "start": 0, "end": 2, "sampled": True, "versions": [1]}
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    sample = {
        "messages": messages,
        "turns": [turn],
        "completion": "4",
        "accuracy": 1.0,
        "reward": 1.0,
        "rewards": {"correct": 1.0},
        "metrics": {},
        "tokens": 2,
        "ending": "stop",
        "error": None,
    }
    (folder / "validation").mkdir()
    tasks = [{"task": f"sum:{number}", "environment": "arithmetic", "answer": "4", "samples": [sample]} for number in range(3)]
    (folder / "validation" / "step_000002.json").write_text(json.dumps({"step": 2, "metrics": {}, "tasks": tasks}))
    return folder


def write_steps(folder: Path, steps: range) -> None:
    """Write ``metrics.jsonl`` with a loss for each step, which is not a number in the second."""
    lines = [
        json.dumps({"step": 2, "train/loss": None, "validation/accuracy": 1.0, "nonfinite": {"train/loss": "nan"}})
        if step == 2
        else json.dumps({"step": step, "train/loss": step / 10, "timing/train/total_step_time": 2.0})
        for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def inflate(path: Path, column: str, *, size: int, count: int, dictionary: bool) -> None:
    """Write a file of rollouts with one long text in each row."""
    rows = pq.read_table(path).slice(0, 1)
    table = pa.concat_tables([rows] * count)
    values = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["a" * size])) if dictionary else None
    texts = values if values is not None else pa.array(["a" * size] * count, pa.large_string())
    table = table.set_column(table.column_names.index(column), column, pa.chunked_array([texts]))
    pq.write_table(table, path, compression="zstd", use_dictionary=dictionary, store_schema=False)

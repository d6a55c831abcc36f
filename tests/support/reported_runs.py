"""A finished run on disk with everything that a report shows, made up: no model, no training."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from strop.monitoring.rollout_store.rollout_record import make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import RunStart, record_finish, record_run_start, record_start
from strop.monitoring.waits import LogEntry, Status, write_status
from strop.types import Group, Message, Rollout, Task
from support.rollouts import sampled_turn
from support.saved_runs import CONFIG

STEPS = 30
HOSTILE = (
    '\x1b]0;owned\x07\u202egnp.exe\u2066</script><script>alert(1)</script><img src="http://x/y" onerror="z">'
    "</style></title></p><style>*{display:none}</style>{policy}&lt;svg/onload=alert(2)>' onclick='alert(3)"
)


def write_run(
    folder: Path, *, text: str = "an answer", model: str = "tiny", steps: int = STEPS, validations: bool = True
) -> Path:
    """Write the log folder of a run. ``text`` is what the model, the tasks and the settings say. Return the folder."""
    folder.mkdir(parents=True)
    config = CONFIG.format(model=model) + f"run_name: {json.dumps(text)}\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    lines = [json.dumps(_metrics(step, steps)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in (0, steps) if validations else ():
        _write_validation(folder, step, better=step > 0, text=text)
    store = RolloutStore(folder, "parquet", decode=lambda tokens: text)
    for step in (1, steps):
        store.write(
            step,
            make_records(
                step, [_make_group(text)], advantages={(0, 0): 1.0}, learner_logprobs={(0, 0): torch.tensor([-0.2, -0.9])}
            ),
        )
    record_start(folder, step=0, config={"a": 1}, changed={})
    for after in (0, 20):
        record_run_start(folder, RunStart(after_step=after, time=f"2026-11-2{after // 10} 10:00:00", command=f"strop grpo run_name={text}",
            versions={"python": "3.11.7", "strop": "0.1", "torch": f"2.{after}"},
            hardware={"processor": "a CPU"}, data={"data.train[0]": text}))  # fmt: skip
    record_start(folder, step=20, config={}, changed={"grpo.seed": (3, 4)})
    record_finish(folder, step=steps, end="steps")
    write_status(folder, _make_status(text, steps))
    return folder


def _metrics(step: int, steps: int) -> dict[str, float]:
    return {
        "step": step, "train/reward": step / steps, "train/entropy": 2.0 - step / steps, "train/token_mult_prob_error": 1.0 + step / 1e4,
        "train/gen_kl_error": 1e-6, "train/groups_dropped_for_errors": float(step in (13, 14, 19)),
        "health/rewards_are_equal": float(step == 5),
        "timing/train/generation": 1.0, "timing/train/policy_training": 2.0, "timing/train/storing": 0.01,
        "timing/train/total_step_time": 3.2,
        "train/total_tokens": 100.0 * step,
    }  # fmt: skip


def _write_validation(folder: Path, step: int, *, better: bool, text: str) -> None:
    tasks = []
    for index in range(20):
        right = float(index < (14 if better else 4) and not (better and index == 0))
        messages = [{"role": "user", "content": f"{index}? {text}"}, {"role": "assistant", "content": text}]
        turn = {"role": "assistant", "text": f"{text} {step}", "start": 0, "end": 2, "sampled": True, "versions": [step]}
        sample = {"sample": 0, "messages": messages, "turns": [turn], "completion": text, "accuracy": right, "answer": text,
                  "reward": right,                  "rewards": {text: right}, "metrics": {}, "tokens": 2,
                  "ending": "stop", "error": None}  # fmt: skip
        tasks.append({"task": f"sum:{index}", "environment": "arithmetic", "answer": text, "samples": [sample]})
    target = folder / "validation" / f"step_{step:06d}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"step": step, "metrics": {}, "tasks": tasks}))


def _make_group(text: str) -> Group:
    task = Task(id="sum:0", question=text, answer=text)
    rollout = Rollout(task=task, sample=0, seed=1, messages=(Message("user", text),), prompt=torch.tensor([1, 2]))
    done = rollout.with_turn(sampled_turn([4, 5], [-0.5, -0.1]), Message("assistant", text))
    return Group(index=0, environment="arithmetic", version=0, rollouts=(done,))


def _make_status(text: str, steps: int) -> Status:
    return Status(
        state="finished", pid=1, host="elsewhere", process_started=0.0, started=0.0, written=1.0, interval=5.0, step=steps, stepped=1.0,
        doing="", loop_silent=0.0, waits=(), versions={"python": "3.11.7"}, command="strop grpo", checkpoints=None, troubles=(), error=None,
        notes=(LogEntry(1.0, f"warning: {text}"), LogEntry(2.0, "a note")), reports=(LogEntry(3.0, text),), stacks=None,
    )  # fmt: skip

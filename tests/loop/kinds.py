"""Tiny runs of every kind, from ``strop sft`` to ``strop distillation``, and their recorded data: small sums."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loop.runs import Outcome, Running, metrics_of, overrides, repeatable, start, tiny_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore

Row = Mapping[str, Any]

DATA = {"sft": "conversations", "dpo": "preferences", "rm": "preferences"}  # the data of runs on recorded data
SUMS = [(a, b) for a in range(4) for b in range(6)]
GRADED = {  # for runs that sample: an environment in which every rollout earns a reward
    "data.train.env_name": "graded",
    "data.validation.env_name": "graded",
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "env.graded.type": f"{Path(__file__).with_name('graded.py')}:Graded",
}


def conversation(a: int, b: int) -> Row:
    """Return a conversation; every third has a second turn."""
    messages = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]
    more = [{"role": "user", "content": "+1="}, {"role": "assistant", "content": str(a + b + 1)}]
    return {"messages": [*messages, *more] if (a + b) % 3 == 0 else messages}


def preference(a: int, b: int) -> Row:
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + a % 2), "margin": 1 + a % 2}


def judgement(a: int, b: int) -> Row:
    right = (a + b) % 2 == 0
    return {"prompt": f"{a}+{b}=", "completion": str(a + b) if right else "no", "label": right}


MAKERS: Mapping[str, Callable[[int, int], Row]] = {
    "conversations": conversation,
    "preferences": preference,
    "judgements": judgement,
}


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_data(folder: Path) -> None:
    """Write 16 training and 8 validation examples of every kind."""
    for kind, make in MAKERS.items():
        write_rows(folder / f"{kind}.jsonl", [make(*pair) for pair in SUMS[:16]])
        write_rows(folder / f"{kind}_held_out.jsonl", [make(*pair) for pair in SUMS[16:]])


def recorded_config(section: str, model: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of six steps with four examples each, validated at every step. ``changes`` as in ``tiny_config``."""
    data = "judgements" if changes.get("algorithm.name") in ("kto", "apo_zero_unpaired") else DATA[section]
    settings: dict[str, Any] = {
        "policy.model_name": str(model),
        "policy.max_total_sequence_length": 64,
        "policy.train_global_batch_size": 4,
        "policy.precision": "float32",
        "policy.device": "cpu",
        "policy.num_threads": 1,
        "policy.optimizer.kwargs.lr": 0.003,
        "data.train.dataset_name": f"{data}.jsonl",
        "data.validation.dataset_name": f"{data}_held_out.jsonl",
        f"{section}.max_num_steps": 6,
        f"{section}.max_num_epochs": None,
        f"{section}.val_period": 1,
        "checkpointing.checkpoint_dir": "results",
        "checkpointing.keep_top_k": 1,
        "checkpointing.save_period": 2,
        "logger.log_dir": "logs",
        "logger.console": "plain",
    }
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def sampling_config(section: str, model: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of ``tiny_config`` for any kind of run that samples. The default teacher is the policy itself."""
    settings = {key.replace("grpo.", f"{section}.", 1): value for key, value in tiny_config(model).items()}
    settings |= GRADED
    settings["logger.console"] = "plain"
    if section == "ppo":
        settings["value.optimizer.kwargs.lr"] = 0.01
    if section == "distillation":
        settings |= {"teacher.model_name": str(model), "distillation.num_generations_per_prompt": 4}
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def start_run(section: str, model: Path, folder: Path, *, before: Callable[[], None] | None = None, **changes: Any) -> Running:
    """Start ``strop SECTION`` with the tiny settings in ``folder``, and write recorded data there if it is missing."""
    config = recorded_config if section in DATA else sampling_config
    if section in DATA and not (folder / "conversations.jsonl").exists():
        write_data(folder)
    return start([section, *overrides(config(section, model, **changes))], folder, before=before)


def train(section: str, model: Path, folder: Path, *, before: Callable[[], None] | None = None, **changes: Any) -> Outcome:
    return start_run(section, model, folder, before=before, **changes).finish()


def train_to_end(section: str, model: Path, folder: Path, **changes: Any) -> str:
    """Run to the end and return the output. Asserts success."""
    outcome = train(section, model, folder, **changes)
    assert outcome.code == 0, outcome.err
    return outcome.out + outcome.err


def refusal_message(outcome: Outcome, code: int = 1) -> str:
    """Return the error output of a rejected run. Asserts its exit code and that it has no traceback."""
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err and "error: " in outcome.err
    return outcome.err


def bitwise_equal(one: Any, other: Any) -> bool:
    """Return whether two trees of tensors and numbers are bitwise equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(bitwise_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(bitwise_equal, one, other))
    return bool(one == other)


def assert_same_run(folder: Path, wanted: Path) -> None:
    """Every metric, rollout and validation sample; of the newest checkpoint weights, positions and optimizers bit for bit."""
    assert repeatable(metrics_of(folder / "logs")) == repeatable(metrics_of(wanted / "logs"))
    assert list(RolloutStore(folder / "logs").read_all()) == list(RolloutStore(wanted / "logs").read_all())
    for path in sorted((wanted / "logs" / "validation").glob("*.json")):
        assert json.loads((folder / "logs" / "validation" / path.name).read_text()) == json.loads(path.read_text()), path
    kept, others = (sorted(path.name for path in (each / "results").glob("step_*")) for each in (folder, wanted))
    assert kept == others
    newest = max((wanted / "results").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    compared = set()
    for path in sorted(newest.rglob("*")):
        own = folder / path.relative_to(wanted)
        if path.name == "optimizer.pt":
            assert bitwise_equal(*(torch.load(each, weights_only=True) for each in (own, path))), path
        elif path.suffix in (".safetensors", ".json") and path.name != "files.json":
            assert own.read_bytes() == path.read_bytes(), path
        compared.add(path.suffix)
    assert {".safetensors", ".json", ".pt"} <= compared

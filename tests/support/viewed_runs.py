"""Runs written directly, for the page of ``strop view``: two seeds, one of another clip, one of recorded data, one just begun."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from strop.extensions.watch.timeline_file import TIMELINE_FILE, append_line
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_images import image_name
from strop.monitoring.waits import LogEntry, Status, Wait, write_status

STEPS, GROUPS, SAMPLES = 24, 3, 4
PROMPT = "What is it?"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
THOUGHT = "First the tens, then the ones; there is nothing to carry, I think. "


def _draw(digits: str) -> bytes:
    """A PNG of 8 by 6 grey squares, which an image of the same name always is."""
    chance, file = random.Random(digits), io.BytesIO()
    image = Image.new("L", (8, 6))
    image.putdata([chance.randrange(256) for _ in range(48)])
    image.resize((160, 120), Image.Resampling.NEAREST).save(file, format="PNG")
    return file.getvalue()


IMAGES = tuple((hashlib.sha256(content).hexdigest(), content) for content in (_draw("first"), _draw("second")))
PARTS = {
    "generation": 1.6,
    "drain": 0.1,
    "packing": 0.02,
    "logprobs": 0.4,
    "policy_training": 1.1,
    "weight_sync": 0.2,
    "storing": 0.03,
}


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer with some merges, as a model's folder has it; no model, and neither Torch nor Transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        [f"I call the calculator with 1. {THOUGHT} The answer is 2. What is plus? Let me add and count."], trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_runs(folder: Path, tokenizer_folder: Path | None = None, num_extra_metrics: int = 0) -> None:
    """Write the runs into ``folder``. ``tokenizer_folder`` is named as the model, so that tokens have texts."""
    model = str(tokenizer_folder or "someone/model-135M")
    for name, seed, clip in (("quickstart", 1, 0.2), ("quickstart-seed-2", 2, 0.2), ("wide-clip", 1, 0.28)):
        run = folder / name
        run.mkdir(parents=True)
        _write_config(run, "grpo", model, seed, clip)
        _write_metrics(run, seed + (10 if clip > 0.2 else 0), num_extra_metrics)
        _write_rollouts(run, seed, tokenizer_folder)
        write_timeline(run, range(1, STEPS + 1))
        _write_validations(run)
        _write_status(run, seed)
    recorded = folder / "recorded-data-with-a-long-name-that-tells-all-its-settings-lr-0.0001-epochs-3-batch-64"
    recorded.mkdir()
    _write_config(recorded, "sft", model, 1, 0.2)
    _write_metrics(recorded, 7, 0)
    begun = folder / "just-begun"
    begun.mkdir()
    _write_config(begun, "grpo", model, 1, 0.2)


def _write_config(folder: Path, kind: str, model: str, seed: int, clip: float) -> None:
    text = f"""policy:
  model_name: {json.dumps(model)}
  precision: float32
loss_fn:
  ratio_clip_max: {clip}
{kind}:
  seed: {seed}
  max_num_steps: {STEPS}
logger:
  log_dir: {json.dumps(folder.name)}
env_vars:
  API_KEY: secret-value
"""
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def _write_metrics(folder: Path, seed: int, num_extra: int) -> None:
    chance = random.Random(seed)
    lines = []
    for step in range(1, STEPS + 1):
        progress = 1 - math.exp(-step / 8)
        times = {f"timing/train/{part}": seconds * chance.uniform(0.8, 1.2) for part, seconds in PARTS.items()}
        metrics: dict[str, Any] = {
            "train/reward": progress * 0.9 + chance.gauss(0, 0.04),
            "train/loss": 0.02 * chance.gauss(0, 1),
            "train/grad_norm": 0.6 + 0.2 * chance.random(),
            "train/entropy": 1.4 - progress + 0.05 * chance.random(),
            "train/token_mult_prob_error": 1 + 0.002 * chance.random(),
            "train/mean_gen_tokens_per_sample": 40 + 10 * progress,
            "generation/prefix_hit_rate": 0.6 + 0.2 * progress,
            **times,
            "timing/train/total_step_time": sum(times.values()) + 0.2,
            **{f"train/environments/env_{index // 20}/part_{index % 20}": chance.random() for index in range(num_extra)},
        }
        if step % 8 == 0:
            metrics |= {
                "validation/accuracy": 0.2 + 0.7 * progress,
                "validation/reward": progress,
                "timing/train/validation": 0.8,
                "timing/train/total_step_time": sum(times.values()) + 1.0,
            }
        if step == STEPS:
            metrics |= {"health/entropy_collapsed": 1.0, "train/kl_penalty": None, "nonfinite": {"train/kl_penalty": "nan"}}
        lines.append(json.dumps({"step": step, **metrics}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def write_timeline(folder: Path, steps: range) -> None:
    """Write the time line of samples: the last one of each step is late, and began in the step before."""

    def wait(group: int, sample: int) -> list[Any]:
        end = 1400 if (group, sample) == (2, 3) else 700
        return [["engine 1", 10, 300 + 50 * sample], ["environment 1", 400, end], ["rewards", end, end + 50]]

    for step in steps:
        groups = [
            {
                "group": group, "kept": group < 2 or step % 2 == 1, "from": -500 if group == 2 else 0, "to": 1500,
                "samples": {sample: wait(group, sample) for sample in range(SAMPLES)},
            }
            for group in range(GROUPS)
        ]  # fmt: skip
        line = {
            "step": step, "began": 1.7e9 + 4 * step, "seconds": 3.6, "phases": [["generation", 0, 1600], ["policy_training", 2100, 3200]],
            "syncs": [["engine-0 to take version 1", 3200, 3400]], "groups": groups, "more": 5, "lost": 0, "collected": 1600,
            "seconds_of": {"engine": 4.5, "environment": 4.3, "tools": 0.0, "rewards": 0.6, "waiting": 8.4, "ended": 1.8},
            "last": [2, 3, 1450], "median": 1000,
        }  # fmt: skip
        append_line(folder / TIMELINE_FILE, line)


def _write_rollouts(folder: Path, seed: int, tokenizer_folder: Path | None) -> None:
    store = RolloutStore(folder)
    encode = _load_encoder(tokenizer_folder)
    for step in range(1, STEPS + 1):
        chance = random.Random(seed * 1000 + step)
        store.write(
            step, [_make_record(step, group, sample, chance, encode) for group in range(GROUPS) for sample in range(SAMPLES)]
        )
    for digest, content in IMAGES:
        store.images.folder.mkdir(parents=True, exist_ok=True)
        (store.images.folder / f"{image_name(digest)}.png").write_bytes(content)


def _load_encoder(folder: Path | None) -> Any:
    if folder is None:
        return lambda text: [ord(letter) % 250 for letter in text]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def _make_record(step: int, group: int, sample: int, chance: random.Random, encode: Any) -> RolloutRecord:
    """The first group talks with a tool and has a branch; of the second one sample is hostile and one reasons at length; of the third,
    which was dropped in even steps, one is shown images."""
    left, right = 10 + group, 7 + group
    right_answer = chance.random() < step / STEPS
    answer = f"The answer is {left + right if right_answer else left - right}."
    texts = [("assistant", f"What is {left} plus {right}? Let me add: {left} and {right}. {answer}", True, 0)]
    if group == 0:
        texts = [
            ("assistant", f"I call the calculator with {left} plus {right}.", True, 0),
            ("tool", str(left + right), False, 0),
            ("assistant", answer, True, 0),
            ("assistant", f"Another way: count from {left}. {answer}", True, 1),
        ]
    if (group, sample) == (1, 0):
        texts = [("assistant", f"{HOSTILE} \x1b[31mred {answer}", True, 0)]
    if (group, sample) == (1, 1):
        texts = [("assistant", f"<think>\n{THOUGHT * 12}\n</think>\n\n{answer}", True, 0)]
    question = f"What is {left} plus {right}?"
    if (group, sample) == (2, 2):
        question = f"[image: numbers.png]{question}"
        texts = [
            ("assistant", "I see two numbers.", True, 0),
            ("user", "And here? [image: more.png] Say it.", False, 0),
            ("assistant", answer, True, 0),
        ]
    turns, tokens, sampled = [], [], []
    for role, text, by_policy, path in texts:
        ids = encode(text)
        calls, tool = (("calculator",) if text.startswith("I call") else ()), ("calculator" if role == "tool" else "")
        place: dict[str, Any] = {"start": len(tokens), "end": len(tokens) + len(ids), "path": path, "calls": calls, "tool": tool}
        if "[image" in text:
            place["images"] = (image_name(IMAGES[1][0]),)
        turns.append(TurnRecord(role=role, text=text, sampled=by_policy, versions=(step - 1,) if by_policy else (), **place))
        tokens += ids
        sampled += [by_policy] * len(ids)
    sampler = tuple(-chance.expovariate(1.5) if by_policy else 0.0 for by_policy in sampled)
    learner = tuple(value + chance.gauss(0, 0.1) if by_policy else 0.0 for value, by_policy in zip(sampler, sampled, strict=True))
    dropped = group == 2 and step % 2 == 0
    reward = float(right_answer)
    record = RolloutRecord(
        step=step,
        group=group,
        environment="arithmetic" if group else "calculator",
        task_id=f"sum:{left}+{right}",
        sample=sample,
        prompt="",
        completion="".join(turn.text for turn in turns if not turn.path),
        prompt_tokens=tuple(encode(PROMPT)),
        tokens=tuple(tokens),
        sampled=tuple(sampled),
        sampler_logprobs=sampler,
        learner_logprobs=None if dropped else learner,
        versions=tuple(step - 1 if by_policy else -1 for by_policy in sampled),
        advantage=None if dropped else reward - 0.5 + chance.gauss(0, 0.3),
        reward=reward,
        rewards={"correct": reward, "format": 1.0},
        ending="stop" if sample else "length",
        error=None,
        kept=not dropped,
        dropped_because="filtered" if dropped else None,
        answer=str(left + right),
        prompt_messages=({"role": "system", "content": "Add numbers."}, {"role": "user", "content": question}),
        prompt_images=((1, image_name(IMAGES[0][0])),) if question.startswith("[") else (),
        turns=tuple(turns),
        branches=((0, len(encode(PROMPT)) + turns[0].end),) if group == 0 else (),
        metrics={"digits": 2.0},
    )
    return record if dropped else replace(record, **_make_token_columns(record, chance))


def _make_token_columns(record: RolloutRecord, chance: random.Random) -> Mapping[str, Any]:
    """The columns of tokens that are stored on request."""
    count, sampled = len(record.tokens), record.sampled
    masked = [by_policy and chance.random() < 0.05 for by_policy in sampled]
    return {
        "entropy": tuple(chance.uniform(0, 2) if each else 0.0 for each in sampled),
        "reference_logprobs": tuple(value + chance.gauss(0, 0.2) for value in record.sampler_logprobs),
        "mask": tuple(each and not left_out for left_out, each in zip(masked, sampled, strict=True)),
        "mask_reason": tuple(_reason(left_out, each) for left_out, each in zip(masked, sampled, strict=True)),
        "clipped": tuple(bool(sampled[place]) and chance.random() < 0.05 for place in range(count)),
    }


def _reason(left_out: bool, by_policy: bool) -> str:
    return "environment" if not by_policy else "rejected" if left_out else ""


def _write_validations(folder: Path) -> None:
    (folder / "validation").mkdir()
    for step in (8, 16, 24):
        tasks = []
        for number in range(6):
            messages = [
                {"role": "user", "content": f"What is {number} plus 2?"},
                {"role": "assistant", "content": f"It is {number + 2}."},
            ]
            right = number < step / 5
            sample = {
                "reward": float(right), "rewards": {"correct": float(right)}, "ending": "stop", "error": None, "messages": messages,
                "completion": messages[-1]["content"], "tokens": 6, "accuracy": float(right), "metrics": {},
            }  # fmt: skip
            tasks.append({"task": f"sum:{number}+2", "environment": "arithmetic", "answer": str(number + 2), "samples": [sample]})
        (folder / "validation" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "tasks": tasks}), encoding="utf-8")


def _write_status(folder: Path, seed: int) -> None:
    now = time.time()
    waits = (
        Wait(1, "the step", "group 12", "", "", None, 14.0, None, 1, False),
        Wait(2, "group 12", "engine 0", "4 samples", "generation", 600.0, 13.5, 1, 1, False),
    )
    status = Status(
        state="finished", pid=1, host="node", process_started=0, started=now - 300, written=now - 5, interval=5.0, step=STEPS,
        stepped=now - 6,        doing="generation", loop_silent=0.0, waits=waits, versions={"python": "3.11", "torch": "2.13"},
        command=f"strop grpo config.yaml grpo.seed={seed}", checkpoints=None, troubles=(), error=None,
        notes=(LogEntry(now - 250, "validation after step 8: accuracy 0.58"),), reports=(), stacks=None,
    )  # fmt: skip
    write_status(folder, status)

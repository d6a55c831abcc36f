"""SFT, DPO and reward models in TRL and in Strop, alternating optimizer steps on one CPU.

    pip install -e '.[bench]'        python benchmarks/sft_dpo_rm_vs_trl.py --steps 5 --dtype both --json results.json

Both sides use the same model, optimizer, dtype and threads, and the same data in every optimizer step. Each side has its own process and
computes only in its turn (benchmarks/README.md). First each side tries several micro-batch sizes and keeps the fastest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from common import (
    DISTURBED,
    MODEL,
    SIDES,
    Side,
    SideFailed,
    SideProcess,
    Spread,
    TurnTimer,
    machine_line,
    memory,
    number,
    order,
    reset_peak_memory,
    run_in_subprocess,
    save,
    silence_libraries,
    spread,
    table,
    use_threads,
    versions,
    wait_for_quiet,
)

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One comparison: an objective and TRL's row layout."""

    name: str
    kind: Literal["sft", "dpo", "rm"]  # Strop's configuration section
    about: str
    rows: Literal["padded", "bfd", "wrapped"] = "padded"  # TRL's row layout; the latter two are its packing strategies
    precomputed: bool = True  # whether reference log-probabilities, if used, are precomputed
    comparable: bool = True  # whether both sides compute the same loss
    sizes: tuple[int, ...]  # TRL micro-batch sizes: examples, or tokens of a packed row

    @property
    def packed(self) -> bool:
        return self.rows != "padded"


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="sft", kind="sft", sizes=(4, 8, 16), about="SFT; TRL pads each micro-batch"),
        Mode(
            name="sft-packed",
            kind="sft",
            rows="bfd",
            sizes=(512, 1024),
            about="SFT; TRL packs conversations into rows (bfd) and separates them with a dense mask",
        ),
        Mode(name="dpo", kind="dpo", sizes=(2, 4, 8), about="DPO; both sides precompute the reference log-probabilities"),
        Mode(name="rm", kind="rm", sizes=(2, 4, 8), about="Bradley-Terry reward model"),
        Mode(
            name="sft-wrapped",
            kind="sft",
            rows="wrapped",
            sizes=(512, 1024),
            comparable=False,
            about="SFT; TRL cuts one stream of tokens into rows (wrapped): conversations attend to each other, and some are split",
        ),
        Mode(
            name="dpo-online",
            kind="dpo",
            precomputed=False,
            sizes=(2, 4, 8),
            about="DPO; both sides compute the reference log-probabilities in each step",
        ),
    )
}
USUAL = ("sft", "sft-packed", "dpo", "rm")
STROP_SIZES = (1024, 2048, 4096)  # policy.sequence_packing.train_mb_tokens

# The template ends each turn with the end-of-turn token, so that both sides have the same loss tokens: SmolLM2's own template adds a line
# break after it, which TRL trains on and Strop does not. TRL uses the generation markers to find the loss tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nassistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Race:
    """Settings of one comparison."""

    mode: Mode
    model: str  # a folder: a causal LM, or a sequence classifier for a reward model
    data: str  # a JSONL file, ``per_step`` rows for each step
    folder: str  # for outputs
    dtype: str
    threads: int
    per_step: int  # examples: conversations, or pairs
    warmup: int
    steps: int
    size: int = 0  # this side's micro-batch size, from Mode.sizes or STROP_SIZES
    learning_rate: float = 1e-5
    beta: float = 0.1
    seed: int = 42
    trl_options: Mapping[str, bool] = field(default_factory=dict)  # reuse_memory, sort_rows, compile

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps


@dataclass(frozen=True)
class Ready:
    """Sent by a side when it has loaded and waits for its first turn."""

    resident: float  # MiB
    configuration: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step as measured by its side."""

    side: Side
    step: int  # 1-based, warm-up included
    seconds: float  # from the start of the turn to its end
    phases: Mapping[str, float]  # the same time, in more detail; the rest is data, packing, logging
    loss: float  # before the update
    data_tokens: int  # tokens of the step's sequences; a pair's prompt counts twice, padding does not count
    trained_tokens: int  # loss tokens; for a reward model, scores
    tokens_read: int  # by the forward pass, including padding; shared prefixes count once
    peak_memory: float  # MiB, of the process since its model was loaded
    foreign: float  # cores used by other processes during the step

    @property
    def computing(self) -> float:
        return self.phases["forward, backward"]


class TurnTaker(Protocol):
    """Tells a side when to take its turns."""

    def begin(self, ready: Ready) -> None:
        """Report readiness. Returns when the first step may begin."""

    def done(self, step: Step) -> None:
        """Report a step. Returns when the next step may begin, immediately after the last one."""


# ---- data ----------------------------------------------------------------------------------------------------------------------

TEXT = (
    "the people of this city want to know how much water is in old river and why it will be so cold near our house when we go out "
    "for work each day with some food from that small market where they can buy more bread than last year before her first long walk "
    "back home after school or see what their friends found under a big tree by one side road"
)
WORDS = tuple(TEXT.split())  # one token each for most tokenizers
SPEAKING = 8  # non-word tokens of a question and its answer: roles, line breaks, ends of turns


def quantiles(low: int, high: int, count: int, *, skew: float = 1.0) -> list[int]:
    """Return ``count`` lengths from ``low`` to ``high``, evenly spaced, or concentrated near ``low`` if ``skew`` is above 1."""
    return [low + round((high - low) * ((place + 0.5) / count) ** skew) for place in range(count)]


def words(count: int, draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(max(count, 1)))


def make_exchange(tokens: int, share: float, draw: random.Random) -> list[dict[str, str]]:
    """Return a question and an answer, about ``tokens`` tokens in total. ``share`` is the answer's share of the words."""
    said = tokens - SPEAKING
    answer = max(1, round(said * share))
    return [
        {"role": "user", "content": words(said - answer, draw)},
        {"role": "assistant", "content": words(answer, draw)},
    ]


def make_conversation(tokens: int, share: float, draw: random.Random) -> Row:
    """Return one exchange, or two from 80 tokens on."""
    if tokens < 80:
        return {"messages": make_exchange(tokens, share, draw)}
    first = tokens // 2
    return {"messages": [*make_exchange(first, share, draw), *make_exchange(tokens - first, share, draw)]}


def conversations(count: int, draw: random.Random) -> list[Row]:
    """Return conversations of 20 to 120 tokens, a third of them up to 30; answers are 30 to 80 % of the words."""
    shares = [0.3 + 0.5 * (place * 0.618 % 1) for place in range(count)]
    rows = [make_conversation(*each, draw) for each in zip(quantiles(20, 120, count, skew=2), shares, strict=True)]
    draw.shuffle(rows)
    return rows


def preferences(count: int, draw: random.Random) -> list[Row]:
    """Return pairs with prompts of 30 to 80 tokens and answers of 10 to 60, half of them up to 22."""
    prompts = [tokens - SPEAKING + 2 for tokens in quantiles(30, 80, count)]
    chosen, rejected = ([tokens - 1 for tokens in quantiles(10, 60, count, skew=2)] for _ in range(2))
    order_of = random.Random(count)  # the same combinations of lengths in every step
    order_of.shuffle(chosen)
    order_of.shuffle(rejected)
    rows = [
        {"prompt": words(prompt, draw), "chosen": words(better, draw), "rejected": words(worse, draw)}
        for prompt, better, worse in zip(prompts, chosen, rejected, strict=True)
    ]
    draw.shuffle(rows)
    return rows


def make_rows(kind: str, per_step: int, steps: int, seed: int) -> list[Row]:
    """Return the rows of all steps. All steps have the same lengths, in different order and with different words."""
    make = conversations if kind == "sft" else preferences
    return [row for step in range(steps) for row in make(per_step, random.Random(f"{seed} {kind} {step}"))]


def write_rows(path: str, rows: Sequence[Row]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(race: Race) -> list[dict[str, Any]]:
    """Return the rows of all steps."""
    lines = Path(race.data).read_text().splitlines()
    return [json.loads(line) for line in lines[: race.per_step * race.total_steps]]


# ---- the TRL side --------------------------------------------------------------------------------------------------------------


def trl_configuration(race: Race, micro_batches: int) -> dict[str, Any]:
    """Return TRL's fastest settings on a CPU; benchmarks/README.md explains each."""
    own: dict[str, dict[str, Any]] = {
        "sft": {"padding_free": race.mode.rows == "bfd", "loss_type": "nll"},
        "dpo": {"beta": race.beta, "loss_type": ["sigmoid"], "precompute_ref_log_probs": race.mode.precomputed},
        "rm": {"center_rewards_coefficient": None},
    }
    return {
        **own[race.mode.kind],
        "per_device_train_batch_size": 1 if race.mode.packed else race.size,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": race.total_steps,
        "max_length": None,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch_fused",
        "learning_rate": race.learning_rate,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        # fastest on a CPU
        "use_cpu": True,
        "bf16": race.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "torch_compile": race.trl_options.get("compile", False),
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": race.seed,
        "output_dir": f"{race.folder}/trl",
    }


def run_trl(race: Race, turns: TurnTaker) -> None:
    """Train with TRL's trainer, returning the turn after every optimizer step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PrinterCallback, TrainerCallback
    from trl import (  # type: ignore[attr-defined]
        DPOConfig,
        DPOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

    from strop.learner.budget.device_memory import reuse_freed_memory
    from strop.models.loading import load_tokenizer

    torch.set_num_threads(race.threads)
    if race.trl_options.get("reuse_memory"):
        reuse_freed_memory()
    parts: dict[str, tuple[Any, Any]] = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "rm": (RewardTrainer, RewardConfig),
    }
    trainer_kind, config_kind = parts[race.mode.kind]
    laps, seen = TurnTimer(), TokenCounts()

    class TimedTrainer(trainer_kind):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.count(race.mode.kind, inputs)
            with laps("forward, backward"):
                loss = super().training_step(model, inputs, *args, **kwargs)
            seen.loss += float(loss)
            return loss

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.begin(Ready(memory("VmRSS"), configuration))
            reset_peak_memory()
            laps.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds, spent = laps.stop()
            phases = {**spent, "clip, optimizer": laps.since("forward, backward")}
            step = seen.step(state.global_step, seconds, phases, laps.foreign())
            turns.done(step)
            seen.reset()
            laps.start()

    tokenizer = load_tokenizer(race.model)
    dataset, micro_batches = trl_dataset(race, tokenizer)
    configuration = trl_configuration(race, micro_batches)
    auto = AutoModelForSequenceClassification if race.mode.kind == "rm" else AutoModelForCausalLM
    trainer = TimedTrainer(
        model=auto.from_pretrained(race.model, dtype=torch.float32),
        args=config_kind(**configuration),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class TokenCounts:
    """Counts the inputs of TRL's trainer in one optimizer step."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.loss, self.data, self.trained, self.read = 0.0, 0, 0, 0

    def count(self, kind: str, inputs: Mapping[str, Any]) -> None:
        ids = inputs["input_ids"]
        self.read += ids.numel()
        self.data += int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else ids.numel()
        match kind:
            case "sft":
                self.trained += int((inputs["labels"][:, 1:] != -100).sum())
            case "dpo":
                self.trained += int(inputs["completion_mask"][:, 1:].sum())
            case _:
                self.trained += len(ids)

    def step(self, step: int, seconds: float, phases: Mapping[str, float], foreign: float) -> Step:
        return Step(
            side="trl",
            step=step,
            seconds=seconds,
            phases=phases,
            loss=self.loss,
            data_tokens=self.data,
            trained_tokens=self.trained,
            tokens_read=self.read,
            peak_memory=memory(),
            foreign=foreign,
        )


def trl_dataset(race: Race, tokenizer: Any) -> tuple[Any, int]:
    """Return the rows in TRL's format and the micro-batches per step. Raises ValueError if steps have different numbers of rows."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = read_rows(race)
    steps = [rows[start : start + race.per_step] for start in range(0, len(rows), race.per_step)]
    if race.mode.kind != "sft":
        listed = [make_pair(row) for step in steps for row in sorted_rows(race, step)]
        return Dataset.from_list(listed), race.per_step // race.size
    tokenized = [[tokenize_conversation(row, tokenizer) for row in sorted_rows(race, step)] for step in steps]
    if not race.mode.packed:
        return Dataset.from_list([row for step in tokenized for row in step]), race.per_step // race.size
    packed = [packed_step(step, race.size, race.mode.rows) for step in tokenized]
    if len({len(step) for step in packed}) > 1:
        raise ValueError(
            f"packed into rows of {race.size} tokens, steps have {[len(step) for step in packed]} rows: set another size"
        )
    return Dataset.from_list([row for step in packed for row in step]), len(packed[0])


def sorted_rows(race: Race, step: Sequence[Row]) -> list[Row]:
    """Return the step's rows, sorted by length on request, as Transformers' sampler "batch_rebalance" does within a step."""
    return sorted(step, key=lambda row: -len(json.dumps(row))) if race.trl_options.get("sort_rows") else list(step)


def tokenize_conversation(row: Row, tokenizer: Any) -> dict[str, list[int]]:
    """Tokenize a conversation like TRL with ``assistant_only_loss``."""
    found = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    taught = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return {"input_ids": found["input_ids"], "labels": [token if kept else -100 for token, kept in taught]}


def packed_step(step: Sequence[Mapping[str, list[int]]], length: int, strategy: str) -> list[dict[str, Any]]:
    """Pack one step's conversations like TRL. ``packing=True`` would pack the whole dataset and mix the steps."""
    from datasets import Dataset
    from trl import pack_dataset

    return list(pack_dataset(Dataset.from_list(list(step)), length, strategy))


def make_pair(row: Row) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }


# ---- the Strop side ------------------------------------------------------------------------------------------------------------


def strop_config(race: Race) -> Any:
    """Return a user's configuration, with metrics.jsonl enabled."""
    from strop.config import TRAINING_RUNS, load_config

    section = race.mode.kind
    own = {
        "sft": [],
        "dpo": [
            f"dpo.reference_policy_kl_penalty={race.beta}",
            f"dpo.precompute_reference={'true' if race.mode.precomputed else 'false'}",
        ],
        "rm": [],
    }
    overrides = [
        *own[section],
        f"policy.model_name={race.model}",
        "policy.device=cpu",
        f"policy.precision={race.dtype}",
        f"policy.num_threads={race.threads}",
        f"policy.train_global_batch_size={race.per_step}",
        "policy.max_total_sequence_length=512",
        f"policy.sequence_packing.train_mb_tokens={race.size}",
        f"policy.sequence_packing.logprob_mb_tokens={race.size}",
        f"policy.optimizer.kwargs={{lr: {race.learning_rate!r}, weight_decay: 0.0, betas: [0.9, 0.999], eps: 1.0e-8}}",
        "policy.max_grad_norm=1.0",
        f"{section}.max_num_steps={race.total_steps}",
        f"{section}.max_num_epochs=1",
        f"{section}.val_period=0",
        f"{section}.seed={race.seed}",
        "checkpointing.enabled=false",
        f"logger.log_dir={race.folder}/strop",
        "logger.console=none",
        "data.shuffle=false",
        f"data.train={{dataset_name: {race.data}}}",
    ]
    return load_config(None, overrides, root=TRAINING_RUNS[section]).config


def run_strop(race: Race, turns: TurnTaker) -> None:
    """Train with Strop's own loop, returning the turn after each logged step."""
    from strop.base_config import to_tree
    from strop.monitoring.trackers.base import NullTracker
    from strop.runs.lifecycle import make_tracker
    from strop.runs.open_run import open_run
    from strop.runs.run_algorithm import make_run_algorithm
    from strop.trainer.train import train
    from strop.types import Batch, Group

    config = strop_config(race)
    laps = TurnTimer()
    groups: list[Group] = []
    batches: list[Batch] = []

    class Stream:
        """Records the groups read."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def next(self) -> Group:
            group: Group = await self.inner.next()
            groups.append(group)
            return group

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Learner:
        """Measures the learner's time from outside."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def forward_backward(self, batch: Batch, loss: Any) -> Any:
            batches.append(batch)
            with laps("forward, backward"):
                return await self.inner.forward_backward(batch, loss)

        async def step(self) -> Any:
            with laps("clip, optimizer"):
                return await self.inner.step()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Steps(NullTracker):
        """Ends the turn when the step logs, which is its last action."""

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            tracker.log(step, metrics)
            turns.done(record(step, metrics))
            groups.clear()
            batches.clear()
            laps.start()

    def record(step: int, metrics: Mapping[str, float]) -> Step:
        seconds, spent = laps.stop()
        return Step(
            side="strop",
            step=step,
            seconds=seconds,
            phases={**spent, "reference": metrics["timing/train/logprobs"]},
            loss=metrics["train/loss"],
            data_tokens=sum(rollout.length for group in groups for rollout in group.rollouts),
            trained_tokens=sum(int(batch.mask.sum()) for batch in batches),
            tokens_read=sum(len(batch.tokens) for batch in batches),
            peak_memory=memory(),
            foreign=laps.foreign(),
        )

    async def run_all() -> None:
        async with open_run(config, make_run_algorithm(config), Steps()) as run:
            run.stream = Stream(run.stream)
            run.learners = {"policy": Learner(run.learners["policy"])}
            turns.begin(Ready(memory("VmRSS"), to_tree(config)))
            reset_peak_memory()
            laps.start()
            await train(run)

    tracker = make_tracker(config)
    asyncio.run(run_all())
    tracker.close()


# ---- trying sizes --------------------------------------------------------------------------------------------------------------

RUN: Mapping[Side, Callable[[Race, TurnTaker], None]] = {"trl": run_trl, "strop": run_strop}


class StepCollector:
    """Grants every turn immediately and collects the steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def begin(self, ready: Ready) -> None:
        pass

    def done(self, step: Step) -> None:
        self.steps.append(step)


def try_sizes(side: Side, race: Race, sizes: Sequence[int]) -> dict[int, float]:
    """Return the seconds of forward and backward per step by micro-batch size. The first size takes an extra warm-up step."""
    from strop.learner.budget.device_memory import trim_freed_memory

    silence_libraries()
    found = {}
    for place, size in enumerate(sizes):
        turns = StepCollector()
        RUN[side](replace(race, size=size, warmup=0, steps=1 if place else 2), turns)
        found[size] = turns.steps[-1].computing
        gc.collect()
        trim_freed_memory()
    return found


def fastest(found: Mapping[int, float]) -> int:
    return min(found, key=lambda size: found[size])


def usable_sizes(mode: Mode, wanted: Sequence[int], per_step: int) -> list[int]:
    """Return the TRL micro-batch sizes that divide a step of ``per_step`` examples; packed rows may have any length."""
    if mode.packed:
        return list(wanted)
    return [size for size in wanted if per_step % size == 0] or [per_step]


# ---- taking turns --------------------------------------------------------------------------------------------------------------


class Baton:
    """Turns granted by the parent process."""

    def __init__(self, connection: Connection, last: int) -> None:
        self.connection, self.last = connection, last

    def begin(self, ready: Ready) -> None:
        self.connection.send(ready)
        self.connection.recv()

    def done(self, step: Step) -> None:
        self.connection.send(step)
        if step.step < self.last:
            self.connection.recv()


def trl_side(race: Race, connection: Connection) -> None:
    run_trl(race, Baton(connection, race.total_steps))


def strop_side(race: Race, connection: Connection) -> None:
    run_strop(race, Baton(connection, race.total_steps))


@dataclass(frozen=True, kw_only=True)
class Result:
    """One comparison in one dtype."""

    race: Race
    ready: dict[Side, Ready]
    tried: dict[Side, dict[int, float]]
    first: dict[Side, Step]
    steps: dict[Side, list[Step]]  # without the warm-up

    def __post_init__(self) -> None:
        check(self)

    @property
    def ratios(self) -> Spread:
        """TRL / Strop for each step."""
        return spread(trl.seconds / strop.seconds for trl, strop in zip(*(self.steps[side] for side in SIDES), strict=True))

    @property
    def foreign(self) -> float:
        return max(step.foreign for side in SIDES for step in self.steps[side])


# The first losses of the sides may differ by this much, since summation order and, in bfloat16, rounding differ.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}


def check(result: Result) -> None:
    """Raise SideFailed if the sides trained on different numbers of tokens or have different first losses."""
    if not result.race.mode.comparable:
        return
    for steps in zip(*([result.first[side], *result.steps[side]] for side in SIDES), strict=True):
        for name in ("data_tokens", "trained_tokens"):
            trl, strop = (getattr(step, name) for step in steps)
            if trl != strop:
                raise SideFailed(f"step {steps[0].step}: TRL has {trl} {name.replace('_', ' ')}, Strop {strop}")
    first = result.first
    expected = {side: math.log(2) for side in SIDES} if result.race.mode.kind == "dpo" else {"strop": first["trl"].loss}
    for side, loss in expected.items():
        if not abs(first[side].loss - loss) <= TOLERANCE[result.race.dtype]:
            raise SideFailed(f"the first loss of the {side} side is {first[side].loss:.6f}, where {loss:.6f} is expected")


def compare(race: Race, sizes: Mapping[Side, Sequence[int]], patience: float) -> Result:
    """Find each side's best micro-batch size, then alternate the two sides."""
    tried: dict[Side, dict[int, float]] = {}
    for side in SIDES:
        if len(sizes[side]) > 1:
            wait_for_quiet(patience)
            tried[side] = run_in_subprocess(try_sizes, side, race, sizes[side])
    best = {side: fastest(tried[side]) if side in tried else sizes[side][0] for side in SIDES}
    bodies = {"trl": trl_side, "strop": strop_side}
    players: dict[Side, SideProcess] = {}
    ready: dict[Side, Ready] = {}
    for side in SIDES:  # load one after the other
        players[side] = SideProcess(side, bodies[side], replace(race, size=best[side]))
        ready[side] = players[side].receive(Ready)
    records: dict[Side, list[Step]] = {side: [] for side in SIDES}
    for pair in range(race.total_steps):
        for side in order(pair):
            wait_for_quiet(patience)
            step: Step = players[side].turn("step", Step)
            show(step, warm=pair < race.warmup)
            records[side].append(step)
    for player in players.values():
        player.process.join()
    return Result(
        race=race,
        ready=ready,
        tried={side: tried.get(side, {best[side]: math.nan}) for side in SIDES},
        first={side: records[side][0] for side in SIDES},
        steps={side: records[side][race.warmup :] for side in SIDES},
    )


def show(step: Step, *, warm: bool) -> None:
    phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in step.phases.items() if seconds >= 0.005)
    rest = f"loss {step.loss:.4f}{'  (warm-up)' if warm else ''}"
    rest += f"  (others: {step.foreign:.1f} cores)" if step.foreign > DISTURBED else ""
    print(f"  step {step.step:2} {step.side:5} {step.seconds:7.2f} s  {phases}  {rest}", flush=True)


# ---- the report ----------------------------------------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> str:
    """Format a table of seconds and ratios, a table of tokens and memory, and the checks."""
    return "\n\n".join([times_table(results), tokens_table(results), "\n".join(map(checks, results))]) + disturbance(results)


def times_table(results: Sequence[Result]) -> str:
    header = ["seconds per step, median (min to max)", "TRL", "Strop", "TRL / Strop, pair by pair"]
    rows = [
        [label(result), *(str(spread(step.seconds for step in result.steps[side])) for side in SIDES), str(result.ratios)]
        for result in results
    ]
    return table(header, rows)


def tokens_table(results: Sequence[Result]) -> str:
    header = ["per step", "tokens of data", "read by TRL", "by Strop", "data tokens/s TRL", "Strop", "peak MiB TRL", "Strop"]
    return table(header, [[label(result), *map(number, tokens(result))] for result in results])


def tokens(result: Result) -> list[float]:
    pairs = [result.steps[side] for side in SIDES]
    read = [median(step.tokens_read for step in steps) for steps in pairs]
    rates = [median(step.data_tokens / step.seconds for step in steps) for steps in pairs]
    peaks = [max(step.peak_memory for step in steps) for steps in pairs]
    return [median(step.data_tokens for step in pairs[1]), *read, *rates, *peaks]


def checks(result: Result) -> str:
    """Format what both sides agree on and their micro-batch sizes."""
    first = result.first
    sizes = "; ".join(f"{side} {tried_sizes(result.tried[side])}" for side in SIDES)
    if not result.race.mode.comparable:
        return f"{label(result)}: another loss than Strop's ({result.race.mode.about}). Micro-batches: {sizes}"
    apart = max(abs(trl.loss - strop.loss) for trl, strop in zip(*(result.steps[side] for side in SIDES), strict=True))
    counts = f"trained on {first['trl'].trained_tokens} and {first['strop'].trained_tokens} {units(result)} a step"
    losses = f"first loss {first['trl'].loss:.5f} and {first['strop'].loss:.5f}, later ones within {number(apart)}"
    return f"{label(result)}: TRL and Strop {counts}; {losses}. Micro-batches: {sizes}"


def units(result: Result) -> str:
    return "scores" if result.race.mode.kind == "rm" else "tokens"


def tried_sizes(found: Mapping[int, float]) -> str:
    best = fastest(found)
    others = ", ".join(f"{size}: {number(seconds)} s" for size, seconds in found.items())
    return f"{best}" if len(found) == 1 else f"{best} ({others})"


def label(result: Result) -> str:
    return f"{result.race.mode.name}, {result.race.dtype}"


def disturbance(results: Sequence[Result]) -> str:
    worst = max(result.foreign for result in results)
    if worst <= DISTURBED:
        return ""
    return f"\n\nNOT A QUIET MACHINE: other processes used up to {worst:.1f} cores during a step; measure again without them."


def as_json(result: Result) -> dict[str, Any]:
    return {
        "race": asdict(result.race),
        "configuration": {side: ready.configuration for side, ready in result.ready.items()},
        "resident_when_loaded_mib": {side: ready.resident for side, ready in result.ready.items()},
        "tried": result.tried,
        "first": {side: asdict(step) for side, step in result.first.items()},
        "steps": {side: [asdict(step) for step in steps] for side, steps in result.steps.items()},
        "ratios": asdict(result.ratios),
    }


# ---- the command line ----------------------------------------------------------------------------------------------------------


def prepare_language_model(name: str, folder: str) -> None:
    """Save the model as float32 safetensors with this benchmark's chat template."""
    from strop.models.loading import load_model, load_tokenizer

    save(load_model(name), load_tokenizer(name, chat_template=CHAT_TEMPLATE), folder)


def prepare_classifier(name: str, folder: str, seed: int) -> None:
    """Save a sequence classifier with one label, so that both sides start with the same score layer and padding token."""
    from strop.models.loading import find_stop_token_ids, load_tokenizer
    from strop.models.value_network import load_classifier, set_pad_token

    model, tokenizer = load_classifier(name, seed=seed), load_tokenizer(name)
    set_pad_token(model, tokenizer, find_stop_token_ids(model, tokenizer))
    save(model, tokenizer, folder)


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a hub name or a folder (default: %(default)s)")
    modes = "; ".join(f"{mode.name}: {mode.about}" for mode in MODES.values())
    parser.add_argument("--only", help=f"comma-separated comparisons (default: {','.join(USUAL)}). {modes}")
    parser.add_argument("--extras", action="store_true", help="run all comparisons")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, not counted (default: %(default)s)")
    parser.add_argument(
        "--sequences", type=int, default=64, help="conversations a step; half as many pairs (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    parser.add_argument(
        "--trl-sizes",
        type=integers,
        help="TRL micro-batch sizes to try: examples, or tokens in a packed row; default: by comparison",
    )
    parser.add_argument(
        "--strop-sizes",
        type=integers,
        default=STROP_SIZES,
        help="Strop micro-batch sizes to try, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--trl-reuse-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use Strop's malloc settings for TRL's process too (strop.learner.budget.device_memory); default: %(default)s",
    )
    parser.add_argument("--trl-sort-rows", action="store_true", help="sort each step's rows by length for TRL: less padding")
    parser.add_argument("--trl-compile", action="store_true", help="use torch.compile in TRL")
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0,
        metavar="SECONDS",
        help="seconds to wait before each step for an idle machine",
    )
    parser.add_argument("--quick", action="store_true", help="16 sequences a step, 2 steps, float32, one size of micro-batch")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sequences, options.steps, options.dtype = 16, 2, "float32"
        options.strop_sizes = options.strop_sizes[-1:]
    options.modes = tuple(MODES) if options.extras else tuple(options.only.split(",")) if options.only else USUAL
    if unknown := [name for name in options.modes if name not in MODES]:
        parser.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(MODES)}")
    if options.warmup < 1 or options.steps < 1:
        parser.error("--steps and --warmup must be at least 1: a first step pays for compiling kernels and filling caches")
    if options.sequences < 2 or options.sequences % 2:
        parser.error("--sequences must be an even number of at least 2: comparisons of pairs use half as many")
    return options


def candidate_sizes(options: argparse.Namespace, mode: Mode, per_step: int) -> dict[Side, Sequence[int]]:
    found = usable_sizes(mode, options.trl_sizes or mode.sizes, per_step)
    return {"trl": found[-1:] if options.quick else found, "strop": options.strop_sizes}


def make_race(options: argparse.Namespace, mode: Mode, dtype: str, folder: str) -> Race:
    own = f"{folder}/{dtype}-{mode.name}"
    Path(own).mkdir()
    per_step = options.sequences if mode.kind == "sft" else options.sequences // 2
    race = Race(
        mode=mode,
        model=f"{folder}/{'classifier' if mode.kind == 'rm' else 'model'}",
        data=f"{own}/rows.jsonl",
        folder=own,
        dtype=dtype,
        threads=options.threads,
        per_step=per_step,
        warmup=options.warmup,
        steps=options.steps,
        seed=options.seed,
        trl_options={name: getattr(options, f"trl_{name}") for name in ("reuse_memory", "sort_rows", "compile")},
    )
    write_rows(race.data, make_rows(mode.kind, per_step, race.total_steps, options.seed))
    return race


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    use_threads(options.threads)
    try:
        found = versions()
    except metadata.PackageNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install -e '.[bench]'", file=sys.stderr)
        return 1
    print(machine_line(found))
    dtypes = ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/datasets"
        run_in_subprocess(prepare_language_model, options.model, f"{folder}/model")
        if any(MODES[name].kind == "rm" for name in options.modes):
            run_in_subprocess(prepare_classifier, f"{folder}/model", f"{folder}/classifier", options.seed)
        for dtype in dtypes:
            for mode in (MODES[name] for name in options.modes):
                race = make_race(options, mode, dtype, folder)
                print(f"\n{mode.about}\n{options.model}, {dtype}, {race.threads} threads, {race.per_step} examples a step")
                try:
                    results.append(compare(race, candidate_sizes(options, mode, race.per_step), options.wait_quiet))
                except SideFailed as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 1
                print(f"  TRL / Strop {results[-1].ratios}", flush=True)
    print("\n" + summary(results))
    if options.json is not None:
        content = {
            "versions": found,
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "results": [as_json(result) for result in results],
        }
        options.json.write_text(json.dumps(content, indent=1))
        print(f"\nall measurements are in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Whole runs of twenty optimizer steps in TRL's trainers and in Strop: the losses of the steps, and every weight at the end."""

from __future__ import annotations

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from sft_dpo_rm_vs_trl import CHAT_TEMPLATE, conversations, make_pair, preferences, tokenize_conversation

from loop.tiny import build_tiny
from numerics.sections import Numbers, Row, Section, default_type, tensor_difference, value_difference
from strop.models.loading import load_tokenizer

STEPS, PER_STEP = 20, 8  # optimizer steps; examples, or completions, of each
GROUP = 4  # completions of a prompt
LEARNING_RATE = 1e-3
Kind = Literal["sft", "dpo", "rm", "grpo"]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One run. ``theirs`` are TRL's options, ``ours`` keys of Strop's configuration."""

    kind: Kind
    name: str
    theirs: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)


PENALISED = {"grpo.normalize_rewards": False, "loss_fn.reference_policy_kl_penalty": 0.1}
CASES = (
    Case("sft", "SFTTrainer, tokens of the assistant"),
    Case("sft", "SFTTrainer, loss_type dft", {"loss_type": "dft"}, {"algorithm.dft": True}),
    Case(
        "sft",
        "SFTTrainer, linear schedule, norms bounded at 0.1",
        {"lr_scheduler_type": "linear", "max_grad_norm": 0.1},
        {
            "policy.max_grad_norm": 0.1,
            "policy.scheduler": [
                {
                    "name": "torch.optim.lr_scheduler.LinearLR",
                    "kwargs": {"start_factor": 1.0, "end_factor": 0.05, "total_iters": STEPS - 1},
                }
            ],
        },
    ),
    Case("dpo", "DPOTrainer, sigmoid", {"loss_type": ["sigmoid"]}),
    Case("dpo", "DPOTrainer, ipo", {"loss_type": ["ipo"]}, {"algorithm.name": "ipo"}),
    Case("dpo", "DPOTrainer, apo_zero", {"loss_type": ["apo_zero"]}, {"algorithm.name": "apo_zero"}),
    Case("rm", "RewardTrainer, centered by 0.01", {"center_rewards_coefficient": 0.01}, {"rm.centering": 0.01}),
    Case("grpo", "GRPOTrainer, scale_rewards none", {"scale_rewards": "none"}, {"grpo.normalize_rewards": False}),
    Case(
        "grpo",
        "GRPOTrainer, beta 0.1, use_bias_correction_kl false",
        {"scale_rewards": "none", "beta": 0.1, "use_bias_correction_kl": False},
        PENALISED,
    ),
    Case(
        "grpo",
        "GRPOTrainer, beta 0.1, use_bias_correction_kl true",
        {"scale_rewards": "none", "beta": 0.1},
        {**PENALISED, "loss_fn.use_on_policy_kl_approximation": True},
    ),
    Case(
        "grpo",
        "GRPOTrainer, loss_type dr_grpo",
        {"scale_rewards": "none", "loss_type": "dr_grpo"},
        {"grpo.normalize_rewards": False, "loss_fn.aggregation": "constant_length", "loss_fn.constant_length": 8},
    ),
)


def make_data(kind: Kind) -> list[dict[str, Any]]:
    """The examples of all steps, or the prompts."""
    if kind == "grpo":
        return [{"problem": f"{number} + {number % 7}", "answer": "0"} for number in range(STEPS * PER_STEP // GROUP)]
    make = conversations if kind == "sft" else preferences
    rows = [dict(row) for step in range(STEPS) for row in make(PER_STEP, random.Random(f"{kind} {step}"))]
    if kind != "sft":
        return [make_pair({name: text[:90] for name, text in row.items()}) for row in rows]
    return [{"messages": [{**message, "content": message["content"][:90]} for message in row["messages"]]} for row in rows]


def score(tokens: Sequence[int]) -> float:
    """A reward that any token changes."""
    return float(sum(place * token for place, token in enumerate(tokens, 1)) % 11) / 10


# ---- Strop


Sampled = dict[tuple[int, ...], list[list[int]]]  # the completions of each prompt


def train_strop(case: Case, model: Path, folder: Path, precision: str) -> tuple[Trained, Sampled]:
    import strop

    sampled: Sampled = defaultdict(list)

    def reward(task: Any, rollout: Any) -> float:
        tokens = [token for turn in rollout.turns for token in turn.tokens.tolist()]
        sampled[tuple(rollout.prompt.tolist())].append(tokens)
        return score(tokens)

    kwargs = {"lr": LEARNING_RATE, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
    settings: dict[str, Any] = {
        "policy.precision": precision, "policy.device": "cpu", "policy.max_total_sequence_length": 512, "policy.max_grad_norm": 1.0,
        "policy.train_global_batch_size": PER_STEP, "policy.optimizer.kwargs": kwargs, "policy.num_threads": 1, "data.shuffle": False,
        f"{case.kind}.max_num_steps": STEPS, f"{case.kind}.max_num_epochs": 1, f"{case.kind}.val_period": 0, "logger.console": "none",
        "checkpointing.metric_name": None,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "sft": {},
        "dpo": {"dpo.reference_policy_kl_penalty": 0.1},
        "rm": {},
        "grpo": {
            "grpo.num_prompts_per_step": PER_STEP // GROUP, "grpo.num_generations_per_prompt": GROUP, "policy.generation.backend": "torch",
            "policy.generation.max_new_tokens": 8, "loss_fn.reference_policy_kl_penalty": 0.0,
        },
    }  # fmt: skip
    data: Any = make_data(case.kind)
    if case.kind != "grpo":
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in make_data(case.kind)))
    scored = {"reward": reward} if case.kind == "grpo" else {}
    values = {**settings, **own[case.kind], **case.ours}
    run = strop.train(case.kind, model=model, data=data, folder=folder / "strop", **scored, **values)
    return Trained(list(run.metrics["train/loss"]), read_weights(Path(run.model))), sampled


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


# ---- TRL


def train_trl(case: Case, model: Path, folder: Path, precision: str, sampled: Sampled) -> Trained:
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PrinterCallback

    disable_progress_bars()
    names = {"sft": "SFT", "dpo": "DPO", "rm": "Reward", "grpo": "GRPO"}
    trainer_kind, config_kind = (getattr(trl, f"{names[case.kind]}{what}") for what in ("Trainer", "Config"))
    tokenizer, losses = load_tokenizer(str(model)), []

    class Recorded(trainer_kind):  # type: ignore[misc, valid-type]
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            losses.append(float(loss))
            return loss

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            """What Strop sampled: the next completion of each prompt."""
            return [sampled[tuple(prompt)].pop(0) for prompt in prompt_ids], None

    rows = make_data(case.kind)
    extra: dict[str, Any] = {}
    if case.kind == "sft":
        rows = [tokenize_conversation(row, tokenizer) for row in rows]
    elif case.kind == "grpo":
        rows = [{"prompt": [{"role": "user", "content": row["problem"]}]} for row in rows]
        extra["reward_funcs"] = lambda completion_ids, **_: [score(ids) for ids in completion_ids]
    auto = AutoModelForSequenceClassification if case.kind == "rm" else AutoModelForCausalLM
    with default_type(torch.float32):
        trainer = Recorded(
            model=auto.from_pretrained(model, dtype=torch.float32),
            args=config_kind(**{**trl_options(case.kind, folder, precision), **case.theirs}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **extra,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Trained(losses, {name: tensor.detach() for name, tensor in trainer.model.state_dict().items()})


def trl_options(kind: Kind, folder: Path, precision: str) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "sft": {"max_length": None, "train_sampling_strategy": "sequential"},
        "dpo": {"max_length": None, "train_sampling_strategy": "sequential", "beta": 0.1},
        "rm": {"max_length": None, "train_sampling_strategy": "sequential"},
        "grpo": {
            "num_generations": GROUP, "max_completion_length": 8, "shuffle_dataset": False, "beta": 0.0, "loss_type": "dapo",
            "temperature": 1.0, "epsilon": 0.2, "mask_truncated_completions": False,
        },
    }  # fmt: skip
    return {
        **own[kind], "per_device_train_batch_size": PER_STEP, "gradient_accumulation_steps": 1, "max_steps": STEPS, "optim": "adamw_torch",
        "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "use_cpu": True, "bf16": precision == "bfloat16",
        "gradient_checkpointing": False, "logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False, "seed": 1, "output_dir": str(folder / "trl"),
    }  # fmt: skip


# ---- rows


def beside(case: Case) -> Numbers:
    numbers: list[float] = []
    for precision in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory(prefix="strop-numerics-") as temporary:
            folder = Path(temporary)
            model = make_model(folder / "model", case.kind)
            ours, sampled = train_strop(case, model, folder, precision)
            theirs = train_trl(case, model, folder, precision, sampled)
        assert (len(ours.losses), len(theirs.losses)) == (STEPS, STEPS)
        assert theirs.weights.keys() >= ours.weights.keys()
        losses = zip(ours.losses, theirs.losses, strict=True)
        numbers.append(max(value_difference(found, wanted) for found, wanted in losses))
        numbers.append(max(tensor_difference(found, theirs.weights[name]) for name, found in ours.weights.items()))
    return tuple(numbers)


def make_model(folder: Path, kind: Kind) -> Path:
    """The tiny model, for a reward model with one label."""
    with default_type(torch.float32):
        build_tiny(folder, template=CHAT_TEMPLATE)
        if kind == "rm":
            from transformers import AutoModelForSequenceClassification

            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
            model.save_pretrained(folder)
    return folder


def rows() -> Iterator[Row]:
    for case in CASES:
        yield Row(case.name, "TRL", partial(beside, case))


def trl_runs() -> Section:
    return Section(
        "Twenty steps of TRL's trainers",
        f"A Llama of two layers, {STEPS} optimizer steps of {PER_STEP} examples with AdamW at {LEARNING_RATE}: the largest "
        "difference of a step's loss, and of any weight after the last step. TRL's GRPOTrainer gets the completions that Strop "
        "sampled. In bfloat16 both use autocast with float32 weights; twenty steps of AdamW amplify its rounding.",
        ("loss, float32", "weights, float32", "loss, bfloat16", "weights, bfloat16"),
        (1e-5, 1e-4, 0.02, 0.1),
        tuple(rows()),
    )

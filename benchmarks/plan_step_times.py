"""Step times that NVIDIA publishes of NeMo-RL beside what ``strop plan`` computes for the same models, lengths and GPUs.

    python benchmarks/plan_step_times.py                                 # the table of docs/planning.md
    python benchmarks/plan_step_times.py --leave-out                     # each row computed with constants fitted to the others

The rows are those of its performance summary (v0.6, GRPO on H100 and GB200): tokens a rollout and GPUs from the table, the split of GPUs of
asynchronous runs from the recipes beside it. ``--leave-out`` needs scipy.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from strop.hardware.devices import device_named
from strop.planning.learner_memory import LearnerSetup
from strop.planning.model_size import ModelSize
from strop.planning.sharding import Sharding
from strop.planning.step_time import GPU_RATES, StepClock, StepLayout, StepRates, StepTime, StepWork

MODELS = {
    "DeepSeek-V3": ModelSize.from_config(
        "DeepSeek-V3",
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
        },
    ),
    "Qwen3-235B-A22B": ModelSize.from_config(
        "Qwen3-235B-A22B",
        {
            "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": ModelSize.from_config(
        "Qwen3-30B-A3B",
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PublishedStep:
    """A row of the performance summary."""

    device: str
    model: str
    steps_ahead: int
    longest: int  # tokens of a rollout
    average: int
    gpus: int
    generating: int  # GPUs that generate: all of them where learner and engines take turns
    rollouts: int
    engine_size: int
    layout: tuple[int, int, int, int]  # tensor, context, expert, pipeline sizes of the learner
    seconds: float
    recomputes: float = 1.0  # activation_checkpointing of its recipe
    scores: float = 1.0  # the reference; and log-probabilities before the update where it is not on policy
    optimizer_steps: int = 1

    def compute(self, rates: StepRates | None = None) -> StepTime:
        """Return what the plan says. ``rates``: None are its own constants."""
        shared = self.steps_ahead == 0
        training = self.gpus if shared else self.gpus - self.generating
        device = device_named(self.device)
        work = StepWork(
            rollouts=self.rollouts,
            prompt=0,
            completion=self.average,
            longest=self.longest,
            steps_ahead=self.steps_ahead,
            scores=self.scores,
            optimizer_steps=self.optimizer_steps,
        )
        layout = StepLayout(
            device=device,
            training_devices=training,
            generation_devices=self.generating,
            shared=shared,
            engine_size=self.engine_size,
            room=MOST_SEQUENCES,
            rates=rates,
        )
        return StepClock(MODELS[self.model], work, layout, self.make_learner(training)).time_step()

    def make_learner(self, training: int) -> LearnerSetup:
        """Return its learner: Megatron Core with its distributed optimizer, a rollout in a micro-batch."""
        tensor, context, expert, stages = self.layout
        ranks = training // (tensor * stages)
        sharding = Sharding(
            optimizer_shards=ranks, tensor=tensor, context=context, stages=stages, expert=expert,
            expert_optimizer_shards=max(1, training // (stages * expert)), sequence=tensor > 1,
        )  # fmt: skip
        return LearnerSetup(
            tokens=self.longest, longest=self.longest, on_cpu=False, compute_bytes=2, weight_bytes=2,
            checkpointed_share=self.recomputes, sharding=sharding,
        )  # fmt: skip


MOST_SEQUENCES = 256  # that an engine decodes at a time
DEEPSEEK, LARGE, SMALL = MODELS
STEPS = (
    PublishedStep("H100", DEEPSEEK, 0, 1536, 701, 256, 256, 512, 32, (1, 1, 16, 16), 134),
    PublishedStep("H100", DEEPSEEK, 0, 1536, 697, 512, 512, 512, 32, (1, 1, 16, 16), 111),
    PublishedStep("H100", DEEPSEEK, 1, 1536, 710, 512, 256, 512, 32, (1, 1, 16, 16), 64.1),
    PublishedStep("H100", LARGE, 0, 8192, 5698, 128, 128, 512, 16, (2, 2, 16, 8), 395),
    PublishedStep("H100", LARGE, 0, 8192, 5713, 256, 256, 512, 16, (2, 2, 16, 8), 312),
    PublishedStep("H100", LARGE, 1, 8192, 5721, 256, 128, 512, 8, (4, 1, 16, 8), 231),
    PublishedStep("H100", SMALL, 0, 4096, 3203, 32, 32, 2048, 2, (1, 1, 8, 1), 192, recomputes=0),
    PublishedStep("H100", SMALL, 1, 4096, 3201, 32, 16, 2048, 2, (1, 1, 8, 2), 152, recomputes=0),
    PublishedStep("H100", SMALL, 8, 4096, 3206, 192, 64, 2048, 2, (1, 1, 8, 1), 34.5, recomputes=0, scores=2, optimizer_steps=4),
    PublishedStep("GB200", DEEPSEEK, 0, 1536, 711, 128, 128, 512, 32, (1, 1, 16, 8), 108),
    PublishedStep("GB200", DEEPSEEK, 0, 1536, 700, 256, 256, 512, 32, (1, 1, 16, 8), 98.7),
    PublishedStep("GB200", DEEPSEEK, 1, 1536, 708, 256, 128, 512, 16, (1, 1, 16, 8), 61.7),
    PublishedStep("GB200", LARGE, 0, 8192, 5709, 64, 64, 512, 8, (2, 2, 16, 4), 286),
    PublishedStep("GB200", LARGE, 0, 8192, 5693, 128, 128, 512, 8, (2, 2, 16, 4), 345),
    PublishedStep("GB200", LARGE, 1, 8192, 5705, 128, 64, 512, 8, (4, 1, 16, 4), 278),
    PublishedStep("GB200", SMALL, 0, 4096, 3199, 16, 16, 2048, 1, (1, 1, 16, 1), 221, recomputes=0),
    PublishedStep("GB200", SMALL, 1, 4096, 3197, 16, 8, 2048, 1, (1, 1, 8, 1), 301, recomputes=0),
)
FITTED = (
    "sparse_training_share", "bandwidth_share", "layer_seconds", "remote_seconds", "sequence_seconds", "arm_sequence_seconds",
    "sync_bytes_per_second",
    "exposed_sync",
)  # fmt: skip


def error(step: PublishedStep, rates: StepRates | None = None) -> float:
    """Return by which share the computed time is above the published one."""
    return step.compute(rates).total / step.seconds - 1


def make_table(steps: Sequence[PublishedStep] = STEPS) -> str:
    """Return the table of docs/planning.md."""
    lines = [
        "| GPUs | model | steps ahead | generation | training | weight sync | step, computed | published | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        time = step.compute()
        parts = " | ".join(f"{seconds:.0f}" for seconds in (time.generation, time.training, time.exposed_sync * time.weight_sync))
        lines.append(
            f"| {step.gpus} {step.device} | {step.model} | {step.steps_ahead} | {parts} | {time.total:.0f} | {step.seconds:g} | "
            f"{error(step):+.0%} |"
        )
    return "\n".join(lines)


def leave_one_out() -> list[float]:
    """Return the error of each row under constants that are fitted to the other rows."""
    found = []
    for left in STEPS:
        rates = fit([step for step in STEPS if step is not left])
        found.append(error(left, rates))
    return found


def fit(steps: Sequence[PublishedStep]) -> StepRates:
    """Fit the constants to some rows, by the logarithm of the ratio."""
    import numpy as np
    from scipy.optimize import least_squares

    start = np.log([getattr(GPU_RATES, name) for name in FITTED])

    def rates_at(values: Sequence[float]) -> StepRates:
        return replace(GPU_RATES, **dict(zip(FITTED, map(math.exp, values), strict=True)))

    found = least_squares(
        lambda values: [math.log(1 + error(step, rates_at(values))) for step in steps],
        start,
        bounds=(start - 1.5, np.minimum(start + 1.5, np.log([0.6, 1, 1, 1, 1, 1, 1e13, 1]))),
        loss="soft_l1",
        f_scale=0.15,
    )
    return rates_at(found.x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", action="store_true", help="also fit the constants without each row in turn")
    options = parser.parse_args()
    print(make_table())
    print({each.name: getattr(GPU_RATES, each.name) for each in fields(GPU_RATES)})
    if options.leave_out:
        errors = leave_one_out()
        print("left out:", ", ".join(f"{each:+.0%}" for each in errors))
        print(f"within 25 %: {sum(abs(each) <= 0.25 for each in errors)} of {len(errors)}")


if __name__ == "__main__":
    main()

"""The golden run: the tiny model learns to write sevens, twenty steps of GRPO with a KL to the reference, in float32 on one thread."""

from __future__ import annotations

from pathlib import Path

from loop.runs import grpo, metrics_of
from loop.tiny import build_tiny

FILE = Path(__file__).with_name("curve.json")
STEPS = 20
EXACT = ("train/reward", "train/mean_gen_tokens_per_sample", "train/tokens_trained")  # they follow from the sampled tokens alone
CLOSE = ("train/loss", "train/grad_norm", "train/entropy", "train/kl_penalty", "train/logprob")

SETTINGS = {
    "grpo.max_num_steps": STEPS,
    "grpo.num_prompts_per_step": 8,
    "grpo.val_period": 0,
    "policy.generation.temperature": 0.9,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "checkpointing.enabled": False,
    "data.train.env_name": "sevens",
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "env.sevens.type": f"{Path(__file__).with_name('sevens.py')}:Sevens",
}


def curve(folder: Path) -> dict[str, list[float]]:
    """Run it in ``folder``; the values of each metric, step by step."""
    outcome = grpo(build_tiny(folder / "model"), folder / "run", **SETTINGS)
    assert outcome.code == 0, outcome.err
    lines = metrics_of(folder / "run" / "logs")
    assert list(lines) == list(range(1, STEPS + 1))
    return {name: [line[name] for line in lines.values()] for name in (*EXACT, *CLOSE)}

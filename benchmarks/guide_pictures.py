"""Draw the pictures of docs/guides from runs of the starters with SmolLM2-135M: half an hour on two cores.

    python benchmarks/guide_pictures.py FOLDER         # runs what is missing in FOLDER, then writes docs/images/guides

The same command continues or skips a finished run, so that a picture alone is drawn again in seconds.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

import strop
from strop.algorithm_factory import all_parts

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images" / "guides"
WIDTH = 96  # columns of a terminal
CHAIN = "policy.model_name=results/dpo/step_24/policy/weights"
RUNS = (
    *(f"init {kind} --model HuggingFaceTB/SmolLM2-135M-Instruct" for kind in ("sft", "dpo", "grpo", "multi-turn")),
    "sft --config sft.yaml",
    "dpo --config dpo.yaml policy.model_name=results/sft/step_21/policy/weights",
    f"grpo --config grpo.yaml {CHAIN}",
    "grpo --config grpo.yaml run_name=direct logger.log_dir=logs/direct checkpointing.checkpoint_dir=results/direct grpo.max_num_steps=20",
    "grpo --config multi_turn.yaml",
)
TRL = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: train.jsonl\nreward_funcs: [accuracy_reward]\nbeta: 0.01\n"
DRY_RUN = "grpo --config grpo.yaml --dry-run run_name=new"
TERMINALS = {
    "own_data": "rollouts logs/grpo --step 1 --best 1 --worst 1",
    "model": f"{DRY_RUN} policy.precision=bfloat16",
    "multi_turn": "rollouts logs/multi_turn --best 1",
    "many_gpus": f"{DRY_RUN} --assume-gpus 8 cluster.gpus_per_node=8",
    "evaluate_export_serve": "compare logs/direct logs/grpo --step 10",
    "coming_from": "translate --from trl-grpo trl.yaml --gpus 8",
}


def run(command: str, folder: Path) -> str:
    """Return the output of a ``strop`` command; one that fails ends the script."""
    words = [str(Path(sys.executable).with_name("strop")), *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"strop {command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def draw_terminal(name: str, command: str, folder: Path, lines: int = 26) -> None:
    """Draw a command and the beginning of its output, without fonts from elsewhere."""
    shown = run(command, folder).strip("\n").splitlines()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ strop {command}\n", style="bold"))
    console.print(Text.from_ansi("\n".join(shown[:lines] + ["..."] * (len(shown) > lines))), soft_wrap=False)
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=""), flags=re.DOTALL)
    (PICTURES / f"{name}.svg").write_text(re.sub(r"\n\s*\n", "\n", picture), encoding="utf-8")


def draw_curves(name: str, panels: Mapping[str, Mapping[str, pd.Series[Any]]], lines: Mapping[str, float]) -> None:
    """Draw a panel for each title, with a line for each label; ``lines`` are levels to compare with."""
    figure = Figure(figsize=(3.1 * len(panels), 2.4), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for label, values in series.items():
            axes.plot(values.dropna().index, values.dropna(), marker="." if values.count() < 9 else "", label=label)
        if title in lines:
            axes.axhline(lines[title], color="gray", linestyle="--", linewidth=1, label="chance")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(PICTURES / f"{name}.png", dpi=110)


def draw_objectives() -> None:
    """Draw objectives of a token against its ratio, as the code computes them: the value above, the gradient below."""
    ratio = torch.linspace(0.02, 2.4, 400, dtype=torch.float64)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for name in ("clip", "cispo", "soft_gate"):
        for column, credit in enumerate((1.0, -1.0)):
            logprobs = ratio.log().requires_grad_()
            zeros, advantages = torch.zeros_like(ratio), torch.full_like(ratio, credit)
            tokens: Any = SimpleNamespace(logprobs=logprobs, log_ratio=logprobs, ratio=logprobs.exp(), advantages=advantages)
            tokens.old_logprobs = tokens.rollout_logprobs = tokens.entropy = zeros
            value = all_parts()[name]()(tokens)[0]  # type: ignore[operator]
            (gradient,) = torch.autograd.grad(value.sum(), logprobs)
            axes[0, column].plot(ratio, value.detach(), label=name)
            axes[1, column].plot(ratio, gradient)
            axes[0, column].set_title(f"advantage {credit:+.0f}", fontsize=9)
            axes[1, column].set_xlabel("probability ratio, new / old", fontsize=8)
    axes[0, 0].set_ylabel("objective", fontsize=8)
    axes[1, 0].set_ylabel("gradient", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    for each in axes.flat:
        each.grid(alpha=0.3)
        each.tick_params(labelsize=8)
    figure.savefig(PICTURES / "objectives.png", dpi=110)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trl.yaml").write_text(TRL)
    for command in RUNS:
        run(command, folder)
    PICTURES.mkdir(exist_ok=True)
    for name, command in TERMINALS.items():
        draw_terminal(name, command, folder)
    metrics = {name: strop.Run(folder / "logs" / name).metrics for name in ("sft", "dpo", "grpo", "direct")}
    stages = {
        "SFT: validation/loss": {"sft": metrics["sft"]["validation/loss"]},
        "DPO: train/margin": {"dpo": metrics["dpo"]["train/margin"]},
        "GRPO: validation/accuracy": {"after SFT and DPO": metrics["grpo"]["validation/accuracy"]},
    }
    draw_curves("sft_dpo_grpo", stages, {"GRPO: validation/accuracy": 0.25})
    pair = {"from SmolLM2": "direct", "after SFT and DPO": "grpo"}
    shown = ("validation/accuracy", "train/rewards/correct", "train/groups_without_signal")
    flat = {title: {label: metrics[name][title] for label, name in pair.items()} for title in shown}
    draw_curves("flat_reward", flat, {"validation/accuracy": 0.25, "train/rewards/correct": 0.25})
    draw_objectives()
    run(f"algorithm check grpo objective.high=0.28 --plot {shlex.quote(str(PICTURES / 'clip_formula.png'))}", folder)


if __name__ == "__main__":
    main()

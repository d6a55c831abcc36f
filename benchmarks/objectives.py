"""Train every objective on sums with a real model.

    python benchmarks/objectives.py                   # all, one after another: about an hour on two cores
    python benchmarks/objectives.py gspo dpo sft      # some

Policy gradients: the quickstart's task, 20 steps of 8 prompts x 8 rollouts, greedy accuracy on 200 held-out sums before and after.
Recorded data: 40 steps of 16 examples of examples/arithmetic_data.py, loss or accuracy on the held-out ones. Prints the command
of each run. Log folders: logs/objectives/NAME.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.algorithm_factory import all_algorithms
from strop.algorithms.policy_gradient.base import PolicyGradient

ROOT = Path(__file__).parents[1]
RECORDED = {"conversations": ("sft", "conversations"), "preferences": ("dpo", "preferences"), "judgements": ("dpo", "judgements")}


@dataclass(frozen=True)
class Experiment:
    """One training run: a command and the metric that shows whether it learned."""

    name: str
    command: str
    config: str
    metric: str
    overrides: Sequence[str] = ()
    learned: Sequence[str] = field(default=())  # further metrics of the last step worth showing


def experiments() -> Iterator[Experiment]:
    for name, kind in all_algorithms().items():
        if name == "gdpo":  # needs several rewards; a sum has one
            continue
        if name in ("ppo", "vapo"):
            overrides = [f"algorithm.name={name}", "ppo.policy_training_start_step=5"]
            yield Experiment(name, "ppo", "arithmetic/ppo.yaml", "validation/accuracy", overrides, ["train/explained_variance"])
        elif name in ("distillation", "topk_distillation"):
            kl = "train/teacher_kl" if name == "distillation" else "train/kl_reverse"
            overrides = [f"algorithm.name={name}"]
            yield Experiment(name, "distillation", "arithmetic/distillation.yaml", "validation/accuracy", overrides, [kl])
        elif name == "reward_model":
            yield Experiment(name, "rm", "arithmetic/rm.yaml", "validation/accuracy", [], ["validation/loss"])
        elif kind.recorded_data:
            section, data = RECORDED[kind.recorded_data]
            files = [f"data.{part}.dataset_name=data/arithmetic/{data}_{part}.jsonl" for part in ("train", "validation")]
            metric = "validation/accuracy" if data == "preferences" else "validation/loss"
            yield Experiment(
                name, section, f"arithmetic/{section}.yaml", metric, [f"algorithm.name={name}", *files], ["validation/loss"]
            )
        elif issubclass(kind, PolicyGradient):
            overrides = [f"algorithm.name={name}", "grpo.max_num_steps=20", "loss_fn.reference_policy_kl_penalty=null"]
            overrides += ["loss_fn.constant_length=20"] if name == "dr_grpo" else []
            overrides += (
                ["policy.train_global_batch_size=32"] if name == "kl_cov" else []
            )  # it has no effect with one step per batch
            yield Experiment(name, "grpo", "quickstart.yaml", "validation/accuracy", overrides, ["train/reward"])


def run(experiment: Experiment, extra: Sequence[str]) -> dict[int, dict[str, float]]:
    """Run an experiment and return its metrics by step; empty if it failed."""
    folder = Path("logs/objectives") / experiment.name
    command = [
        "strop", experiment.command, "--config", f"examples/configs/{experiment.config}", *experiment.overrides,
        f"logger.log_dir={folder}", "checkpointing.enabled=false", "logger.console=plain", *extra,
    ]  # fmt: skip
    print(f"$ {shlex.join(command)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "strop", *command[1:]], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:])
        return {}
    rows = [json.loads(line) for line in (ROOT / folder / "metrics.jsonl").read_text().splitlines()]
    return {int(row["step"]): row for row in rows}


def summary(experiment: Experiment, steps: dict[int, dict[str, float]], seconds: float) -> str:
    """Format a row of the table."""
    if not steps:
        return f"| {experiment.name} | failed | | | {seconds / 60:.1f} |"
    measured = [row[experiment.metric] for _, row in sorted(steps.items()) if experiment.metric in row]
    trained = [row for step, row in sorted(steps.items()) if step > 0]
    others = []
    for name in experiment.learned:
        seen = [row[name] for row in trained if name in row]
        if seen:
            others.append(f"{name} {seen[0]:.3g} -> {seen[-1]:.3g}")
    ends = f"{measured[0]:.3g} | {measured[-1]:.3g}" if measured else "| "
    return f"| {experiment.name} | {experiment.metric} | {ends} | {'; '.join(others)} | {seconds / 60:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="algorithms (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override for every run")
    options = parser.parse_args()
    chosen = [one for one in experiments() if not options.names or one.name in options.names]
    if missing := set(options.names) - {one.name for one in chosen}:
        parser.error(f"no such algorithm: {', '.join(sorted(missing))}; there are {', '.join(sorted(all_algorithms()))}")
    subprocess.run([sys.executable, str(ROOT / "examples" / "arithmetic_data.py")], cwd=ROOT, check=True, capture_output=True)
    rows = ["| algorithm | metric | before | after | also (first -> last step) | minutes |", "|---|---|---|---|---|---|"]
    for experiment in chosen:
        started = time.perf_counter()
        steps = run(experiment, options.set)
        rows.append(summary(experiment, steps, time.perf_counter() - started))
        print(rows[-1], flush=True)
    print("\n" + "\n".join(rows))


if __name__ == "__main__":
    main()

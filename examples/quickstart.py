"""Run ``strop grpo`` with examples/configs/quickstart.yaml and print a summary (``make quickstart``).

Takes the same overrides, such as grpo.seed=2. Each set of overrides has its own log and checkpoint folders: repeating a command
resumes an interrupted run or shows a finished one, and a different command trains a different model. To train from scratch again,
set checkpointing.resume=never.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.cli import main as strop
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.source.interpolation import format_overrides
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics

CONFIG = Path(__file__).parent / "configs" / "quickstart.yaml"
SHOWN = 4  # tasks shown before and after training; the first ones, not selected
ENDS = 5  # steps averaged at the start and at the end of the run


def main(arguments: Sequence[str]) -> int:
    config = str(CONFIG.relative_to(Path.cwd()) if CONFIG.is_relative_to(Path.cwd()) else CONFIG)
    command = ["grpo", "--config", config, *with_own_name(arguments)]
    print("$ strop", *command, flush=True)
    if any(argument.startswith("-") for argument in arguments):  # --dry-run, --help
        return strop(command)
    found = load_config(CONFIG, command[3:], root=GrpoRunConfig, check=False).config
    before = last_step(Path(found.logger.log_dir))
    status = strop(command)
    if status == 0:
        print(summary(Path(found.logger.log_dir)))
        if found.checkpointing.resume != "never" and before == last_step(Path(found.logger.log_dir)):
            print(
                "\nNothing was trained: this run had already finished. To train it again (its records are moved aside):\n"
                f'  make quickstart ARGS="{" ".join([*arguments, "checkpointing.resume=never"])}"'
            )
    return status


def with_own_name(arguments: Sequence[str]) -> list[str]:
    """Return the overrides plus a name made of them, unless they name the run or leave it the same."""
    if any(argument.startswith("run_name=") for argument in arguments) or not format_overrides(arguments):
        return list(arguments)
    return [*arguments, "run_name=quickstart-{overrides}"]


def last_step(log_dir: Path) -> int | None:
    steps = read_metrics(log_dir / METRICS_FILE)
    return steps[-1][0] if steps else None


def summary(log_dir: Path) -> str:
    """Summarize validation and samples before and after training, the rewards, and the output files."""
    from strop.extensions.reading.plot import plot_run

    steps = read_metrics(log_dir / METRICS_FILE)
    lines = ["", f"Held-out tasks that were never trained on ({log_dir / 'validation'}):"]
    reports = [json.loads(path.read_text()) for path in sorted((log_dir / "validation").glob("step_*.json"))]
    reports = [report for report in reports if report["step"] <= steps[-1][0]]
    if len(reports) > 1:
        lines += [*accuracies(reports[0], reports[-1]), "", *samples(reports[0], reports[-1])]
    else:
        lines.append("  there are no two validations to compare (grpo.val_at_start, grpo.val_at_end)")
    lines += ["", *training([values for step, values in steps if step > 0])]
    lines += ["", f"curves    {plot_run(log_dir)}", f"metrics   {log_dir / METRICS_FILE}", f"rollouts  {log_dir / 'rollouts'}"]
    return "\n".join(lines)


def accuracies(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    lines = []
    for report, when in ((first, "before"), (last, "after")):
        accuracy, tasks = report["metrics"]["accuracy"], len(report["tasks"])
        error = math.sqrt(accuracy * (1 - accuracy) / tasks)
        lines.append(f"  {when:<6} step {report['step']:>3}   accuracy {accuracy:.3f} +- {error:.3f}   ({tasks} tasks)")
    return [*lines, "  (+- is one standard error, from the number of tasks)"]


def samples(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Show the same tasks before and after training."""
    after = {task["task"]: task["samples"][0] for task in last["tasks"]}
    lines = [f"The first {SHOWN} of them:"]
    for task in first["tasks"][:SHOWN]:
        own = task["samples"][0]
        question = next((message["content"] for message in own["messages"] if message["role"] == "user"), task["task"])
        lines.append(f"  {question}   [{task['answer']}]")
        for sample, when in ((own, "before"), (after.get(task["task"]), "after")):
            if sample is not None:
                lines.append(f"    {when:<6} {'right' if sample['accuracy'] >= 1 else 'wrong'}  {sample['completion']!r}")
    return lines


def training(steps: Sequence[Mapping[str, float]]) -> list[str]:
    if not steps:
        return ["No step was trained."]
    seconds = sum(values.get("timing/train/total_step_time", 0.0) for values in steps)
    mismatch = max(values.get("train/token_mult_prob_error", math.nan) for values in steps)
    reward = [values.get("train/reward", math.nan) for values in steps]
    ends = min(ENDS, len(reward))
    return [
        f"Training: {len(steps)} steps in {seconds / 60:.1f} minutes",
        f"  mean reward     {sum(reward[:ends]) / ends:.3f} in the first {ends} steps, {sum(reward[-ends:]) / ends:.3f} in the last {ends}",
        f"  mismatch        sampler and learner give a token probabilities a factor {mismatch:.4f} apart (mean, worst step; 1 is none)",
    ]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

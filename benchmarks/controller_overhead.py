"""The overhead of the training loop: the part of a step outside of generation, rewards, training and weight sync.

    python benchmarks/controller_overhead.py [--steps 8] [--ranks 1 2] [--model NAME]

Runs the quickstart recipe (8 prompts x 8 samples) in one process and over Ray. In one process the overhead is the step time minus
generation, log-probabilities, training and weight sync. Over Ray it also includes remote calls: the driver's training phases minus the
busy time of the busiest rank. Compare the generation times to see what remote calls cost there.

    python benchmarks/controller_overhead.py --made-up 512x4096 2048x1024 8192x256

Measures the driver alone on made-up steps of ROLLOUTSxTOKENS, without a model: CPU time on the event loop, and in threads beside it, with
the memory and the garbage collector set as ``strop grpo`` sets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import MODEL, spread, table

from strop.algorithms.base import TokenOutputs
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.data.packing import pack
from strop.learner.budget.device_memory import repeating_steps, trim_freed_memory
from strop.learner.client import ColumnSources
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import NullTracker
from strop.runs.monitors.run_listeners import RolloutRecorder
from strop.trainer.listeners import StepTimer, StepView, UpdateResult
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.step_metrics import batch_metrics, group_metrics
from strop.types import Ending, Group, Rollout, Task, Turn, assistant, user

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"
WORK = ("generation", "logprobs", "policy_training", "weight_sync", "validation", "checkpointing")
PHASES = ("drain", "packing", "storing")


@dataclass(frozen=True)
class Step:
    seconds: float
    phases: Mapping[str, float]
    worked: float | None  # busy seconds of the busiest rank; None in one process

    @property
    def loop(self) -> float:
        """Seconds outside of all phases of work."""
        return self.seconds - sum(self.phases.get(phase, 0.0) for phase in WORK)

    @property
    def calls(self) -> float:
        """Seconds in which the driver waited while no rank was working."""
        if self.worked is None:
            return 0.0
        return max(0.0, self.phases["policy_training"] + self.phases.get("logprobs", 0.0) - self.worked)

    @property
    def share(self) -> float:
        return (self.loop + self.calls) / self.seconds


def recipe(options: argparse.Namespace, folder: Path, ranks: int) -> Any:
    from strop.config import TRAINING_RUNS, load_config

    settings: dict[str, Any] = {
        "policy.model_name": options.model,
        "grpo.max_num_steps": options.steps,
        "grpo.val_at_start": False,
        "grpo.val_at_end": False,
        "checkpointing.enabled": False,
        "logger.log_dir": str(folder),
        "logger.console": "none",
    }
    if ranks:
        settings |= {"cluster.backend": "ray", "cluster.gpus_per_node": ranks}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(CONFIG, overrides, root=TRAINING_RUNS["grpo"]).config


async def measure(options: argparse.Namespace, folder: Path, ranks: int) -> list[Step]:
    """Measure a run on ``ranks`` ranks; 0 means one process."""
    from strop.monitoring.trackers.jsonl import read_metrics
    from strop.runs.cluster.cluster_run import open_cluster
    from strop.runs.lifecycle import make_tracker
    from strop.runs.open_run import open_run
    from strop.runs.run_algorithm import make_run_algorithm
    from strop.trainer.train import train

    config = recipe(options, folder, ranks)
    tracker = make_tracker(config)
    worked: list[float] = []
    async with open_cluster(config, tracker) as cluster, open_run(config, make_run_algorithm(config), tracker, cluster) as run:
        if ranks:
            group = run.learners["policy"].caller.group  # type: ignore[attr-defined]
            release = run.stream.release

            def noted(count: int) -> None:
                release(count)
                worked.append(max(group.call_all_sync("get_busy_seconds")))

            run.stream.release = noted  # type: ignore[method-assign]
        await train(run)
    tracker.close()
    found = []
    for place, (_, line) in enumerate(read_metrics(folder / "metrics.jsonl")):
        phases = {phase: line.get(f"timing/train/{phase}", 0.0) for phase in (*WORK, *PHASES)}
        before = worked[place - 1] if place and worked else 0.0
        found.append(Step(line["timing/train/total_step_time"], phases, worked[place] - before if worked else None))
    return found[options.warmup :]


def report(found: Mapping[int, list[Step]]) -> None:
    rows = []
    for ranks, steps in found.items():
        rows.append(
            [
                "one process" if not ranks else f"Ray, {ranks} rank{'s' if ranks > 1 else ''}",
                str(spread([step.seconds for step in steps])),
                str(spread([step.phases["generation"] for step in steps])),
                str(spread([1000 * step.loop for step in steps])),
                str(spread([1000 * step.calls for step in steps])),
                f"{100 * median(step.share for step in steps):.2f} % (to {100 * max(step.share for step in steps):.2f} %)",
            ]
        )
    print(table(["where", "step, s", "generation, s", "loop, ms", "calls, ms", "overhead"], rows))
    for ranks, steps in found.items():
        parts = ", ".join(f"{phase} {1000 * median(step.phases[phase] for step in steps):.1f} ms" for phase in PHASES)
        print(f"{'one process' if not ranks else f'Ray, {ranks}'}: {parts}")


def make_up_groups(rollouts: int, tokens: int, group_size: int = 16) -> list[Group]:
    def rollout(sample: int, prompt: torch.Tensor) -> Rollout:
        turn = Turn(
            author="policy",
            tokens=torch.randint(0, 50_000, (tokens,)),
            text="x" * tokens,
            logprobs=-torch.rand(tokens),
            versions=torch.zeros(tokens, dtype=torch.int32),
            num_messages=1,
        )
        messages = (user("question"), assistant(turn.text))
        made = Rollout(task=Task(id="made up"), sample=sample, seed=sample, messages=messages, prompt=prompt, turns=(turn,))
        return replace(made, reward=float(sample % 2), rewards={"made_up": float(sample % 2)}, ending=Ending.STOP)

    prompts = [torch.randint(0, 50_000, (64,)) for _ in range(rollouts // group_size)]
    made = [tuple(rollout(sample, prompt) for sample in range(group_size)) for prompt in prompts]
    return [Group(index=index, environment="made_up", version=0, rollouts=each) for index, each in enumerate(made)]


class CpuTimes:
    """CPU seconds of parts: on the thread of the event loop, and on others."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        thread, process = time.thread_time(), time.process_time()
        yield
        on_loop = time.thread_time() - thread
        self.parts[part] = (on_loop, time.process_time() - process - on_loop)


async def drive(groups: list[Group], folder: Path) -> CpuTimes:
    """Do what the loop does with a step of these groups, besides calling learners and engines."""
    algorithm, times = GRPO(), CpuTimes()
    with times("packing"):
        batch = pack(groups, algorithm.group_credit(groups))
    with times("credit"):
        batch = await ColumnSources(frozenset(), {}).fill(batch, groups)
        batch = algorithm.token_credit(batch)
    logprobs = batch.rollout_logprobs + 0.01 * torch.randn(len(batch.target))
    outputs = TokenOutputs(logprobs=logprobs, entropy=torch.ones_like(logprobs))
    with times("metrics"):
        measured = {**group_metrics(groups, [], [0]), **batch_metrics(batch, outputs), **algorithm.report(batch)}
    result, tracker = UpdateResult(old_outputs=outputs, metrics=measured), NullTracker()
    step = StepView(
        step=1, groups=groups, dropped=(), batch=batch, result=result, metrics=measured, timer=StepTimer(), tracker=tracker
    )
    recorder = RolloutRecorder(store=RolloutStore(folder), algorithm=algorithm, decode=lambda tokens: "x" * len(tokens))
    for listener in (MismatchGuard(), recorder):
        with times(listener.name):
            await listener.on_step(step)
            await listener.on_log(step)
    return times


def measure_made_up(sizes: list[str], steps: int) -> None:
    import strop.runs.open_run  # noqa: F401  # so that the garbage collector finds what it finds in a run

    torch.set_num_threads(1)
    rows = []
    asyncio.run(drive_in(make_up_groups(16, 16)))  # imports
    with repeating_steps():
        for size in sizes:
            rollouts, tokens = map(int, size.split("x"))
            found = []
            for _ in range(steps):
                groups = make_up_groups(rollouts, tokens)
                found.append(asyncio.run(drive_in(groups)).parts)
            scale = 1e6 / rollouts / tokens
            each = [[median(scale * step[part][place] for step in found) for place in (0, 1)] for part in found[0]]
            on_loop = spread([scale * sum(on for on, _ in step.values()) for step in found])
            rows.append([size, *(f"{on:.3f} + {off:.3f}" for on, off in each), str(on_loop)])
            trim_freed_memory()
    print(f"CPU microseconds a token, medians of {steps} steps: on the event loop + beside it")
    print(table(["step", *found[0], "all on the loop"], rows))


async def drive_in(groups: list[Group]) -> CpuTimes:
    with tempfile.TemporaryDirectory() as name:
        return await drive(groups, Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--made-up", nargs="+", metavar="ROLLOUTSxTOKENS")
    options = parser.parse_args()
    if options.made_up:
        return measure_made_up(options.made_up, options.steps)
    found: dict[int, list[Step]] = {}
    with tempfile.TemporaryDirectory() as name:
        for ranks in (0, *options.ranks):
            found[ranks] = asyncio.run(measure(options, Path(name) / str(ranks), ranks))
    report(found)
    if options.output:
        options.output.write_text(json.dumps({str(ranks): [vars(step) for step in steps] for ranks, steps in found.items()}))


if __name__ == "__main__":
    main()

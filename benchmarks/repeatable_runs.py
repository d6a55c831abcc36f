"""What a repeatable asynchronous run costs beside an ordinary one, with environments that answer at once and slowly.

    python benchmarks/repeatable_runs.py [--rounds 3] [--steps 8] [--latency 0 0.03] [--output FILE]

A small random model plays dialogues of up to three turns with the embedded engine, k = 1, weights changing in flight. An answer takes
``--latency`` seconds on average: most take half as long, one in ten takes 5.5 times as long. Each round runs every mode once, in one
process, in an order that rotates; ratios are to the ordinary run of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from common import spread, table

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Messages, Rollout, Task, user

WARM_UP = 2  # steps until the pipeline is full; not counted
MODES: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "recorded": {"record_events": True},
    "repeatable, delay 0": {"repeatable": True},
    "repeatable, delay 8": {"repeatable": True, "answer_delay": 8},
    "repeatable, delay 24": {"repeatable": True, "answer_delay": 24},
}


@dataclass(frozen=True, kw_only=True)
class SlowAnswers(Environment[Task]):
    """Answers each turn after a time that nobody knows."""

    latency: float = 0.0  # mean (seconds)

    def tasks(self, data: DataSource) -> GeneratedTasks[Task]:
        return GeneratedTasks(data.size or 10_000, lambda index: Task(id=str(index), question=f"task {index}"))

    async def _take_time(self) -> None:
        if self.latency:
            slow = random.random() < 0.1
            await asyncio.sleep(self.latency * (random.uniform(4.5, 6.5) if slow else random.uniform(0.4, 0.6)))

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        await self._take_time()
        return (user("again"),) if len(rollout.policy_turns) < 3 and len(rollout.text) % 2 else None

    @reward(weight=1.0, accuracy=True)
    async def letters(self, task: Task, rollout: Rollout) -> float:
        await self._take_time()
        return rollout.text.count("a") / max(len(rollout.text), 1)


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """One run: means over its steps after the warm-up."""

    mode: str
    latency: float  # seconds
    round: int
    seconds: float  # of a step (seconds)
    generation: float  # of it, until the groups are there and no request runs (seconds)
    ticks: float  # of a step: how many steps the engine takes; 0 in the ordinary run, which does not count
    waited: float  # of generation, the engine waited for answers (seconds); 0 in the ordinary run, which does not know


def configure(model: Path, folder: Path, steps: int, latency: float, mode: Mapping[str, Any]) -> Any:
    from strop.config import TRAINING_RUNS, load_config

    settings: dict[str, Any] = {
        "policy.model_name": str(model),
        "policy.device": "cpu",
        "policy.num_threads": 1,
        "policy.precision": "float32",
        "policy.max_total_sequence_length": 256,
        "policy.generation.backend": "torch",
        "policy.generation.max_new_tokens": 24,
        "policy.generation.stop_strings": ["z", "q"],  # so that lengths differ
        "policy.generation.torch_cfg.max_num_seqs": 32,
        "policy.generation.torch_cfg.kv_cache_memory_gb": 0.5,
        "data.max_input_seq_length": 64,
        "data.train.env_name": "slow",
        "env.slow.type": f"{Path(__file__).resolve()}:SlowAnswers",
        "env.slow.latency": latency,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_rollout_turns": 3,
        "grpo.max_num_steps": steps,
        "grpo.max_num_epochs": None,
        "grpo.val_period": 0,
        "grpo.async_grpo.enabled": True,
        "grpo.async_grpo.in_flight_weight_updates": True,
        **{f"grpo.async_grpo.{name}": value for name, value in mode.items()},
        "checkpointing.enabled": False,
        "logger.log_dir": str(folder),
        "logger.console": "none",
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(None, overrides, root=TRAINING_RUNS["grpo"]).config


def measure(model: Path, folder: Path, options: argparse.Namespace, latency: float, name: str, number: int) -> ModeResult:
    """Run one mode and return its means."""
    from strop.build.training_run import run_training
    from strop.monitoring.trackers.jsonl import read_metrics

    if run_training(configure(model, folder, options.steps, latency, MODES[name])):
        raise SystemExit(f"the run {name} failed")
    lines = [line for _, line in read_metrics(folder / "metrics.jsonl")][WARM_UP:]
    return ModeResult(
        mode=name,
        latency=latency,
        round=number,
        seconds=mean(line["timing/train/total_step_time"] for line in lines),
        generation=mean(line["timing/train/generation"] + line.get("timing/train/drain", 0.0) for line in lines),
        ticks=(lines[-1].get("generation/clock_tick", 0.0) - lines[0].get("generation/clock_tick", 0.0)) / max(len(lines) - 1, 1),
        waited=mean(line.get("timing/generation/waited_for_answers", 0.0) for line in lines),
    )


def report(found: list[ModeResult]) -> None:
    for latency in sorted({each.latency for each in found}):
        ordinary = {each.round: each.seconds for each in found if each.latency == latency and each.mode == "ordinary"}
        rows = []
        for mode in MODES:
            runs = [each for each in found if each.latency == latency and each.mode == mode]
            rows.append(
                [
                    mode,
                    str(spread([each.seconds for each in runs])),
                    str(spread([each.seconds / ordinary[each.round] for each in runs])),
                    str(spread([each.generation for each in runs])),
                    str(spread([each.ticks for each in runs])),
                    str(spread([each.waited for each in runs])),
                ]
            )
        print(f"answers take {1000 * latency:.0f} ms on average")
        print(table(["run", "step, s", "of the ordinary one", "generation and drain, s", "ticks", "waited for answers, s"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--latency", type=float, nargs="*", default=[0.0, 0.03])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from sliding_puzzle import build_model, play_poorly

    found: list[ModeResult] = []
    with tempfile.TemporaryDirectory() as name:
        texts = [message.content for seed in range(8) for message in play_poorly(random.Random(seed), 0.5)]
        model = build_model(Path(name) / "model", texts)
        measure(model, Path(name) / "warm", options, 0.0, "recorded", -1)  # imports, and the first pass of everything
        for number in range(options.rounds):
            names = list(MODES)
            for latency in options.latency:
                for mode in names[number % len(names) :] + names[: number % len(names)]:
                    found.append(measure(model, Path(name) / f"{number}-{latency}-{mode}", options, latency, mode, number))
    report(found)
    if options.output:
        options.output.write_text(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main()

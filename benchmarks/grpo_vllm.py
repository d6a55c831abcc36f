"""GRPO with vLLM rollouts on one machine: vLLM against the embedded engine, and asynchronous against synchronous training.

    python benchmarks/grpo_vllm.py engines --steps 12      # the same recipe with both engines, in alternation: A B, B A, ...
    python benchmarks/grpo_vllm.py overlap --steps 8       # one core for the engine and one for the learner, k = 0 and k = 1 in alternation

`engines`: two runs of `strop grpo` alternate steps in this process, each with its own policy, so that both see the same load on a shared
machine. vLLM's processes are idle while the embedded engine works. A step includes sampling, rewards, training, publishing and storing.

`overlap`: a run with k = 0 measures generation and training separately, a run with k = 1 measures the step that overlaps both; several
rounds of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import DISTURBED, MODEL, foreign_seconds, machine_line, number, spread, table, use_threads, versions, wait_for_quiet

from strop.monitoring.trackers.base import NullTracker

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"
SIDES = ("torch", "vllm")


@dataclass(frozen=True, kw_only=True)
class Step:
    side: str
    step: int
    seconds: float
    generation: float
    training: float
    weights: float
    reward: float
    mismatch: float  # token_mult_prob_error
    largest: float  # ratio of one token
    tokens: float  # sampled tokens per rollout, mean
    foreign: float  # cores used by other processes during the step


@dataclass
class Baton:
    """Alternates the steps of the sides: A B, B A, A B, ..."""

    turns: list[str]
    at: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait(self, side: str) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.at < len(self.turns) and self.turns[self.at] == side)

    def pass_on(self) -> asyncio.Task[None]:
        """Pass the turn on immediately, so that its holder cannot take it again, and notify the waiters in a task."""
        self.at += 1
        return asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Stream:
    """Wraps a run's stream to start each step only in its turn."""

    def __init__(self, inner: Any, side: str, baton: Baton, tracker: Recorder, quiet: float) -> None:
        self.inner, self.side, self.baton, self.tracker, self.quiet = inner, side, baton, tracker, quiet

    async def next(self) -> Any:
        if self.tracker.begun is None:
            await self.baton.wait(self.side)
            wait_for_quiet(self.quiet)
            self.tracker.begin()
        return await self.inner.next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Recorder(NullTracker):
    """A tracker that records steps and passes the turn on after each."""

    def __init__(self, side: str, baton: Baton | None) -> None:
        self.side, self.baton = side, baton
        self.steps: list[Step] = []
        self.accuracy: float | None = None
        self.begun: float | None = None
        self.waited = 0.0
        self.last = time.perf_counter()
        self.machine = 0.0
        self.passing: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        self.begun = time.perf_counter()
        self.waited = self.begun - self.last
        self.machine = foreign_seconds()

    def log(self, step: int, logged: Mapping[str, float]) -> None:
        if "validation/accuracy" in logged:
            self.accuracy = logged["validation/accuracy"]
        if "train/reward" not in logged:
            return
        now = time.perf_counter()
        since = self.begun if self.begun is not None else self.last
        seconds = now - since - logged.get("timing/train/validation", 0.0) - logged.get("timing/train/checkpointing", 0.0)
        waited = self.waited if self.baton is not None else 0.0
        record = Step(
            side=self.side,
            step=step,
            seconds=seconds,
            generation=logged["timing/train/generation"] - waited,
            training=logged["timing/train/policy_training"] + logged.get("timing/train/logprobs", 0.0),
            weights=logged["timing/train/weight_sync"],
            reward=logged["train/reward"],
            mismatch=logged["train/token_mult_prob_error"],
            largest=logged["train/token_mult_prob_error_max"],
            tokens=logged["train/mean_gen_tokens_per_sample"],
            foreign=(foreign_seconds() - self.machine) / (now - since) if self.machine else 0.0,
        )
        self.steps.append(record)
        print(
            f"{self.side:6} step {step:3}: {record.seconds:6.2f} s, generation {record.generation:5.2f}, training {record.training:5.2f}, "
            f"weights {record.weights:4.2f}, reward {record.reward:.3f}, mismatch {record.mismatch:.4f}, length {record.tokens:.1f}, "
            f"others {record.foreign:.2f} cores",
            flush=True,
        )
        self.last, self.begun = now, None
        if self.baton is not None:
            self.passing.append(self.baton.pass_on())


def recipe(options: argparse.Namespace, folder: Path, steps: int, **changes: Any) -> Any:
    from strop.config import TRAINING_RUNS, load_config

    settings = {
        "policy.model_name": options.model,
        "policy.precision": options.dtype,
        "policy.generation.vllm_cfg.precision": options.dtype,
        "policy.num_threads": options.threads,
        "policy.generation.max_new_tokens": options.tokens,
        "policy.generation.vllm_cfg.num_threads": options.threads,
        "policy.generation.vllm_cfg.kv_cache_memory_gb": 1,
        "grpo.num_prompts_per_step": options.prompts,
        "grpo.num_generations_per_prompt": options.samples,
        "grpo.max_num_steps": steps,
        "grpo.val_at_start": False,
        "grpo.seed": options.seed,
        "checkpointing.enabled": False,
        "logger.log_dir": str(folder),
        "logger.console": "none",
        **changes,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(CONFIG, overrides, root=TRAINING_RUNS["grpo"]).config


async def begin(config: Any, tracker: Recorder, baton: Baton | None, quiet: float) -> None:
    from strop.runs.run_algorithm import make_run_algorithm
    from strop.runs.train import open_run
    from strop.trainer.train import train

    async with open_run(config, make_run_algorithm(config), tracker) as run:
        if baton is not None:
            run.stream = Stream(run.stream, tracker.side, baton, tracker, quiet)
        await train(run)


async def engines(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    turns = [side for step in range(options.steps) for side in (SIDES if step % 2 == 0 else SIDES[::-1])]
    baton = Baton(turns)
    recorders = {side: Recorder(side, baton) for side in SIDES}
    configs = {
        side: recipe(options, folder / side, options.steps, **{"policy.generation.backend": side, "grpo.val_at_end": True})
        for side in SIDES
    }
    await asyncio.gather(*(begin(configs[side], recorders[side], baton, options.wait_quiet) for side in SIDES))
    return report_engines(options, recorders)


def report_engines(options: argparse.Namespace, recorders: Mapping[str, Recorder]) -> dict[str, Any]:
    torch_steps, vllm_steps = (recorders[side].steps[options.warmup :] for side in SIDES)
    rows = []
    for name in ("seconds", "generation", "training", "weights"):
        ours = [getattr(step, name) for step in vllm_steps]
        embedded = [getattr(step, name) for step in torch_steps]
        ratios = [a / max(b, 1e-9) for a, b in zip(embedded, ours, strict=True)]
        rows.append([name, str(spread(embedded)), str(spread(ours)), str(spread(ratios))])
    busy = max(step.foreign for step in (*torch_steps, *vllm_steps))
    print("\n" + table(["seconds of a step", "embedded", "vllm", "embedded / vllm"], rows))
    print(f"\nother processes used up to {busy:.2f} cores" + (": a disturbed measurement" if busy > DISTURBED else ""))
    curve = [[str(a.step), f"{a.reward:.3f}", f"{b.reward:.3f}", f"{a.mismatch:.4f}", f"{b.mismatch:.4f}", number(b.largest)]
             for a, b in zip(recorders["torch"].steps, recorders["vllm"].steps, strict=True)]  # fmt: skip
    print("\n" + table(["step", "reward embedded", "vllm", "mismatch embedded", "vllm", "largest ratio, vllm"], curve))
    held_out = {side: recorders[side].accuracy for side in SIDES}
    print(f"\naccuracy on held-out sums at the end: {held_out}")
    return {"steps": [asdict(step) for side in SIDES for step in recorders[side].steps], "accuracy": held_out}


async def overlap(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[int, list[Step]] = {0: [], 1: []}
    for number_of_round in range(options.rounds):
        for age in (0, 1) if number_of_round % 2 == 0 else (1, 0):
            wait_for_quiet(options.wait_quiet)
            recorder = Recorder(f"k={age}", None)
            changes = {
                "policy.generation.backend": "vllm",
                "policy.generation.colocated.enabled": False,
                "grpo.async_grpo.enabled": age > 0,
                "grpo.async_grpo.max_trajectory_age_steps": max(age, 1),
                "grpo.val_at_end": False,
            }
            config = recipe(options, folder / f"{age}_{number_of_round}", options.steps, **changes)
            await begin(config, recorder, None, 0.0)
            found[age] += recorder.steps[options.warmup :]
    return report_overlap(found)


def report_overlap(found: Mapping[int, list[Step]]) -> dict[str, Any]:
    apart, ahead = found[0], found[1]
    generation = median(step.generation for step in apart)
    training = median(step.seconds - step.generation for step in apart)
    rows = [
        ["k = 0: step", str(spread(step.seconds for step in apart))],
        ["k = 0: generation", str(spread(step.generation for step in apart))],
        ["k = 0: all else", str(spread(step.seconds - step.generation for step in apart))],
        ["k = 1: step", str(spread(step.seconds for step in ahead))],
        ["k = 1: step / max(generation, all else)", str(spread(step.seconds / max(generation, training) for step in ahead))],
        ["k = 1: step / (generation + all else)", str(spread(step.seconds / (generation + training) for step in ahead))],
    ]
    print("\n" + table(["seconds", "median (extremes)"], rows))
    return {"steps": [asdict(step) for steps in found.values() for step in steps]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("engines", "overlap"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=1, help="steps not counted")
    parser.add_argument("--rounds", type=int, default=2, help="of overlap")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=20, help="longest completion")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="of learner and engine (default: 2, and 1 for overlap)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait before each step for an idle machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.threads = options.threads or (2 if options.what == "engines" else 1)
    use_threads(options.threads)
    print(machine_line(versions()))
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        found = asyncio.run({"engines": engines, "overlap": overlap}[options.what](options, Path(folder)))
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": str(options.json)}, **found}, indent=1))


if __name__ == "__main__":
    main()

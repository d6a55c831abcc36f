"""Where the seconds of a training step go, part by part, and what share of the machine's matrix rate each part reaches.

    python benchmarks/training_phase.py                                  # SmolLM2-135M, float32 and bfloat16
    python benchmarks/training_phase.py --model folder --dtype bfloat16 --json phases.json

The learner is the one that ``strop grpo`` builds. Its batch is made up: 4 prompts of 45 tokens with 8 completions of 64 each, as
``grpo_vs_trl.py --same-work`` has. Seconds are the median of undisturbed steps; one more step under ``torch.profiler`` says how they
divide, by operator: products of the layers (linear layers and their gradients), output layer (everything under its autograd function,
forward and backward), attention, elementwise (norms, rotary embedding, activations, casts and copies), and the rest. Clipping and the
optimizer are timed by themselves. GFLOP counts the arithmetic that training needs, six operations for each weight and row, and what
attention needs; products that are computed twice count once. The rate is that of the same products alone, at the same shapes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from common import (  # noqa: E402
    MODEL,
    ModelShape,
    machine_line,
    number,
    operator_kind,
    prepare_model,
    run_in_subprocess,
    table,
    tree_pairs,
    use_threads,
    versions,
)
from grpo_vs_trl import matrix_rates, model_shape, parse, settings_of, strop_config  # noqa: E402

HEAD = ("TiledLogprobs", "token_logprobs")  # autograd functions of the output layer
FUSED = ("strop::", "fused")  # kernels of norms, rotary embedding and activations, Strop's own or compiled ones
KINDS = {"matrix products": "products of the layers", "attention": "attention"}
ELEMENTWISE = ("elementwise", "softmax and reductions", "casts and copies", "reordering weights")
PARTS = ("products of the layers", "output layer", "attention", "elementwise", "the rest", "clipping, optimizer")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One training step in one dtype."""

    dtype: str
    tokens: int  # read
    predicted: int
    seconds: float  # forward and backward, median
    low: float
    high: float
    parts: Mapping[str, float]  # seconds, whose sum is that of forward, backward and the optimizer
    gflop: Mapping[str, float]
    rates: Mapping[str, float]  # GFLOP/s of the products alone


def part_of(names: Sequence[str]) -> str:
    """Return the part that an operator belongs to, from its name and the names of what it is called by, innermost first."""
    if any(head in name for name in names for head in HEAD):
        return "output layer"
    kinds = [operator_kind(name) for name in names]
    if "attention" in kinds:
        return "attention"
    if kinds[0] in KINDS:
        return KINDS[kinds[0]]
    if "matrix products" in kinds and kinds[0] == "everything else":
        return "products of the layers"
    own = any(mark in names[0] for mark in FUSED) and kinds[0] != "optimizer"
    return "elementwise" if own or kinds[0] in ELEMENTWISE else "the rest"


def divide(events: Sequence[Any]) -> dict[str, float]:
    """Return the seconds of the operators themselves, by part."""
    found = dict.fromkeys(PARTS[:-1], 0.0)
    for event in events:
        names, caller = [event.name], event.cpu_parent
        while caller is not None:
            names.append(caller.name)
            caller = caller.cpu_parent
        found[part_of(names)] += event.self_cpu_time_total / 1e6
    return found


def measure(model: str, dtype: str, options: argparse.Namespace) -> Phase:
    """Train some steps on the made-up batch, in this process."""
    from strop.monitoring.trackers.base import NullTracker
    from strop.runs.run_algorithm import make_run_algorithm
    from strop.runs.train import open_run
    from support.rollouts import pack_for, simple_groups

    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        benchmark = parse(["--threads", str(options.threads), "--max-tokens", str(options.completion), "--dtype", dtype])
        settings = settings_of(benchmark, dtype, model, folder)
        config = strop_config(settings, model)
        algorithm = make_run_algorithm(config)
        groups = simple_groups(*[(options.prompt, (options.completion,) * 8)] * 4)
        batch = algorithm.token_credit(pack_for(groups, algorithm))
        vocabulary = model_shape(model).vocabulary
        batch = replace(batch, tokens=batch.tokens % vocabulary, target=batch.target % vocabulary)

        async def train() -> tuple[list[float], list[float], dict[str, float]]:
            async with open_run(config, algorithm, NullTracker()) as run:
                return await _train(run, batch, options.steps)

        seconds, steps, profile = asyncio.run(train())
    shape = model_shape(model)
    pairs = tree_pairs(batch.segment_length.tolist(), batch.segment_parent.tolist())
    whole = median(seconds)
    scale = whole / sum(profile.values())
    return Phase(
        dtype=dtype,
        tokens=len(batch.tokens),
        predicted=len(batch.target),
        seconds=whole,
        low=min(seconds),
        high=max(seconds),
        parts={**{part: own * scale for part, own in profile.items()}, "clipping, optimizer": median(steps)},
        gflop=needed(shape, len(batch.tokens), len(batch.target), pairs),
        rates=matrix_rates(settings, shape, len(batch.tokens), len(batch.target)),
    )


async def _train(run: Any, batch: Any, count: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Return the seconds of forward and backward, and of the optimizer, of ``count`` steps after a first one, and a profile by part."""
    from torch.profiler import ProfilerActivity, profile

    learner, loss = run.learners["policy"], run.algorithm.losses(0)["policy"]

    async def timed(call: Callable[[], Any]) -> float:
        started = time.perf_counter()
        await call()
        return time.perf_counter() - started

    seconds, steps = [], []
    for _ in range(count + 1):
        seconds.append(await timed(lambda: learner.forward_backward(batch, loss)))
        steps.append(await timed(learner.step))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        await learner.forward_backward(batch, loss)
    await learner.step()
    return seconds[1:], steps[1:], divide(profiler.events())


def needed(shape: ModelShape, tokens: int, predicted: int, pairs: int) -> dict[str, float]:
    """Return the GFLOP of forward and backward that training needs, by part."""
    return {
        "products of the layers": 6.0 * shape.layer_parameters * tokens / 1e9,
        "output layer": 6.0 * shape.hidden * shape.vocabulary * predicted / 1e9,
        "attention": 12.0 * shape.layers * shape.heads * shape.head_size * pairs / 1e9,
    }


def report(phase: Phase) -> str:
    whole = sum(phase.parts.values())
    rates = {
        "products of the layers": phase.rates["layers, training shapes"],
        "output layer": phase.rates["output layer, training shapes"],
    }
    rows = []
    for part in PARTS:
        seconds, work = phase.parts[part], phase.gflop.get(part)
        rate = "" if work is None or not seconds else f"{work / seconds:.0f}"
        share = f"{work / seconds / rates[part]:.0%}" if part in rates and work and seconds else ""
        rows.append([part, number(seconds), f"{seconds / whole:.0%}", "" if work is None else number(work), rate, share])
    work = sum(phase.gflop.values())
    shaped = phase.rates["whole step, training shapes"]
    rows.append(
        [
            "forward, backward",
            number(phase.seconds),
            f"{phase.seconds / whole:.0%}",
            number(work),
            f"{work / phase.seconds:.0f}",
            f"{work / phase.seconds / shaped:.0%}",
        ]
    )
    heading = f"{phase.dtype}: {phase.tokens} tokens read, {phase.predicted} predicted; forward and backward "
    heading += f"{number(phase.seconds)} s ({number(phase.low)} to {number(phase.high)})"
    lines = [heading, table(["", "seconds", "of a step", "GFLOP", "GFLOP/s", "of the rate at its shapes"], rows)]
    lines += [f"  products alone, {name}: {number(rate)} GFLOP/s" for name, rate in phase.rates.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a hub name or a folder (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=45, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--completion", type=int, default=64, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements to this file")
    options = parser.parse_args(arguments)
    use_threads(options.threads)
    print(machine_line(versions()), flush=True)
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        run_in_subprocess(prepare_model, options.model, folder)
        phases = []
        for dtype in ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,):
            phases.append(run_in_subprocess(measure, folder, dtype, options))
            print("\n" + report(phases[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(phase) for phase in phases], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

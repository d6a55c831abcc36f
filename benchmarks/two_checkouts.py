"""Steps of a tiny GRPO run by two checkouts in alternation: the ratios of their times, of their start and of their peak memory.

    python benchmarks/two_checkouts.py --beside ../before --rounds 8

Each round runs both, first one and then the other, and the next round the other way round; a ratio is always of two neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests"))

from loop.runs import overrides, tiny_config  # noqa: E402
from loop.tiny import build_tiny  # noqa: E402

WARM_UP = 5  # steps that are not counted
RUN = "import resource, sys; from strop.cli import main; code = main(sys.argv[1:]); "
RUN += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"


@dataclass(frozen=True)
class Measured:
    step: float  # seconds, median
    total: float  # seconds of the process
    memory: float  # MiB, peak


def run_once(root: Path, model: Path, steps: int) -> Measured:
    """Run a checkout's source once. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        left_out = {name: ... for name in ("checkpointing__metric_name", "checkpointing__keep_top_k")}
        keys = overrides(
            tiny_config(model, grpo__max_num_steps=steps, grpo__val_period=0, checkpointing__enabled=False, **left_out)
        )
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", RUN, "grpo", *keys], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        logged = [json.loads(line) for line in (Path(folder) / "logs/metrics.jsonl").read_text().splitlines()]
    times = [line["timing/train/total_step_time"] for line in logged if line["step"] > WARM_UP]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(statistics.median(times), used, int(done.stdout.split()[-1]) / 1024)


def describe(name: str, ratios: list[float]) -> str:
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    return f"{name}: {middle:.3f} of the other's (median of {len(ratios)} pairs; {low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    other = options.beside.resolve()
    pairs: list[tuple[Measured, Measured]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny(Path(folder) / "model")
        for number in range(options.rounds):
            order = [HERE, other] if number % 2 else [other, HERE]
            found = {root: run_once(root, model, options.steps) for root in order}
            pairs.append((found[HERE], found[other]))
            print(f"round {number + 1}: {found[HERE]} beside {found[other]}", flush=True)
    print(describe("a step", [own.step / theirs.step for own, theirs in pairs]))
    print(describe("processor time of a run", [own.total / theirs.total for own, theirs in pairs]))
    print(describe("peak memory", [own.memory / theirs.memory for own, theirs in pairs]))


if __name__ == "__main__":
    main()

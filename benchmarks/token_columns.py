"""What the token ledger costs a step: seconds and bytes of the columns that are stored with its rollouts, with and without them.

python benchmarks/token_columns.py --rollouts 128 --tokens 512
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from strop.algorithms.base import TokenOutputs
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.monitoring.rollout_store.rollout_record import make_records, split_by_rollout
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.runs.monitors.token_trace import TokenTrace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.rollouts import pack_for, simple_groups

REPETITIONS = 5


@dataclass(frozen=True)
class Cost:
    traced: float  # seconds to compute the columns
    stored: float  # seconds to make the records and to write them
    size: int  # bytes


def measure(rollouts: int, tokens: int) -> tuple[int, list[Cost], list[Cost]]:
    """Return the sampled tokens, and the costs without and with the columns, taken in alternation."""
    lengths = random.Random(0)
    groups = simple_groups(
        *[(32, [lengths.randint(tokens // 2, tokens * 3 // 2) for _ in range(8)]) for _ in range(rollouts // 8)]
    )
    algorithm = GRPO(kl=Kl(weight=0.01))
    batch = pack_for(groups, algorithm)
    count = len(batch.target)
    logprobs = batch.rollout_logprobs - 0.5 * torch.rand(count)
    batch = algorithm.token_credit(batch.with_column("reference_logprobs", logprobs + 0.01 * torch.randn(count)))
    outputs = TokenOutputs(logprobs, torch.rand(count))
    learner = split_by_rollout(logprobs, batch, groups)

    def once(columns: bool) -> Cost:
        start = time.perf_counter()
        trace = TokenTrace(algorithm=algorithm, batch=batch, optimizer_steps=1, note=print)
        trace.active = columns
        trace.observe("policy", torch.arange(count), batch, outputs, algorithm.loss)
        found = trace.columns()
        traced = time.perf_counter() - start
        with TemporaryDirectory() as folder:
            path = RolloutStore(Path(folder)).write(1, make_records(1, groups, learner_logprobs=learner), found)
            assert path is not None
            return Cost(traced, time.perf_counter() - start - traced, path.stat().st_size)

    once(True)
    pairs = [(once(False), once(True)) for _ in range(REPETITIONS)]
    return count, [without for without, _ in pairs], [with_columns for _, with_columns in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512, help="mean length of a rollout")
    options = parser.parse_args()
    count, without, with_columns = measure(options.rollouts, options.tokens)
    print(
        f"{count} tokens in {options.rollouts} rollouts, GRPO with a KL term, {REPETITIONS} repetitions, median (lowest to highest)"
    )
    for name, costs in (("without", without), ("with", with_columns)):
        for part in ("traced", "stored"):
            seconds = sorted(getattr(cost, part) for cost in costs)
            print(f"{name:<8} {part:<7} {statistics.median(seconds):.3f} s ({seconds[0]:.3f} to {seconds[-1]:.3f})")
        print(f"{name:<8} {costs[0].size / count:.1f} bytes a token")


if __name__ == "__main__":
    main()

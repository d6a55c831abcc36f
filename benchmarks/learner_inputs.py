"""What a learner reads besides tokens costs the rollouts that are stored: bytes a token and seconds, of made-up sets and experts.

python benchmarks/learner_inputs.py --rollouts 64 --tokens 200
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from strop.models.routing.router_config import ROUTES
from strop.monitoring.rollout_store.rollout_record import make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.sampling import KEPT, pad_kept_tokens
from strop.types import Group, Turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.rollouts import make_group, make_rollout, sampled_turn

REPETITIONS, VOCABULARY, LARGEST_SET = 5, 49_000, 30
LAYERS, EXPERTS, CHOSEN = 48, 128, 8
PROMPT = 20


def add_sets(turn: Turn) -> Turn:
    """Sets of 2 to 30 ids, any of the vocabulary: nothing is common to two of them, so they compress worse than a model's."""
    sizes = torch.randint(1, LARGEST_SET, (len(turn.tokens),)).tolist()
    sets = [
        torch.cat([torch.randint(VOCABULARY, (size,)), turn.tokens[[place]]]).sort().values for place, size in enumerate(sizes)
    ]
    return replace(turn, columns={KEPT: pad_kept_tokens(sets)})


def add_routes(turn: Turn) -> Turn:
    scores = torch.rand(PROMPT + len(turn.tokens), LAYERS, EXPERTS)
    return replace(turn, columns={ROUTES: scores.topk(CHOSEN).indices.to(torch.int8)})


def make_groups(rollouts: int, tokens: int, add: Callable[[Turn], Turn]) -> list[Group]:
    def make(sample: int) -> Turn:
        return add(sampled_turn(torch.randint(VOCABULARY, (tokens,)).tolist(), (-3 * torch.rand(tokens)).tolist()))

    prompt = list(range(PROMPT + 1))
    return [
        make_group(*(replace(make_rollout(prompt, make(sample)), sample=sample) for sample in range(8)), index=index)
        for index in range(rollouts // 8)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of a rollout, sampled")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds: dict[str, Callable[[Turn], Turn]] = {"plain": lambda turn: turn, "kept_tokens": add_sets, "routes": add_routes}
    groups = {name: make_groups(options.rollouts, options.tokens, add) for name, add in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with TemporaryDirectory() as folder:
        for _ in range(REPETITIONS + 1):
            for name, each in groups.items():
                started = time.perf_counter()
                path = RolloutStore(Path(folder) / name).write(1, make_records(1, each, stores=lambda _: True))
                seconds[name].append(time.perf_counter() - started)
                assert path is not None
        for name, taken in seconds.items():
            size = RolloutStore(Path(folder) / name, "none").path(1).stat().st_size / (options.rollouts * options.tokens)
            found = sorted(taken[1:])  # the first writes load pyarrow
            print(
                f"{name}: {size:.1f} bytes a token, {statistics.median(found):.3f} s ({found[0]:.3f} to {found[-1]:.3f}) to write"
            )


if __name__ == "__main__":
    main()

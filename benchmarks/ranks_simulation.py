"""The driver's work per training step with made-up ranks, up to 1,024: seconds, bytes and calls.

    python benchmarks/ranks_simulation.py [--ranks 1 8 64 512 1024] [--json results.json]

The driver divides a batch into a share for each data-parallel rank, stores each share once, calls every rank and puts the outputs
together. All of that is the real code (``strop.distributed.workers.remote_learner``). The ranks are made up: they answer at once with
outputs of the right shapes, and their time is not counted. Storing is pickling, as Ray does before it copies the bytes. What Ray adds to a
call is not in the seconds; the number of calls is printed.

Two questions: how does the work grow with the ranks if the batch stays the same, and if each rank's part stays the same? Each line also
says what whole batches cost: the bytes that each rank was sent, and the seconds that each rank took to find its part in them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import table

from strop.algorithms.base import TokenOutputs
from strop.data.packing import pack
from strop.data.rollout_selector import RolloutSelector
from strop.data.shares import ShareRequest, SplitRule
from strop.data.splitting import partition_batch
from strop.distributed.actor_group import ActorGroup
from strop.distributed.workers.remote_learner import RankCaller
from strop.learner.client import LearnerClient
from strop.learner.parallel.micro_batch import MicroBatchOutputs
from strop.types import Batch, Group, Rollout, Task, Turn

GROUP = 16  # rollouts of a prompt
PROMPT, COMPLETION = 64, 256  # tokens; completions have from half to one and a half times as many
TOKEN_BUDGET = 8192
PASSES = 2  # over a batch in a step: log-probabilities and gradients


@dataclass(frozen=True)
class SimulatedStep:
    """The driver's work for one step."""

    ranks: int
    tokens: int
    seconds: float  # of the driver
    calls: int
    stored_bytes: int  # by the driver, of all shares
    rank_bytes: int  # sent to the rank with the largest share
    whole_bytes: int  # sent to each rank where whole batches travel
    whole_seconds: float  # that each rank takes to find its part in a whole batch
    share_seconds: float  # that a rank takes to cut its share

    def row(self) -> list[str]:
        return [
            f"{self.ranks:,}",
            f"{self.tokens:,}",
            f"{self.seconds:.2f}",
            f"{self.calls:,}",
            f"{self.stored_bytes / 1e6:.1f}",
            f"{self.rank_bytes / 1e6:.2f}",
            f"{self.whole_bytes / 1e6:.1f}",
            f"{self.share_seconds:.3f}",
            f"{self.whole_seconds:.3f}",
        ]


HEADER = [
    "ranks",
    "tokens",
    "driver, s",
    "calls",
    "stored, MB",
    "to a rank, MB",
    "(whole, MB)",
    "rank cuts, s",
    "(of whole, s)",
]


class SimulatedCluster:
    """Stores values as Ray does, by pickling them, and counts their bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: Any) -> Any:
        self.sizes.append(len(pickle.dumps(value, protocol=5)))
        return value


class SimulatedRank:
    """Answers at once with outputs for its share."""

    alive, pid, address = True, None, ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.seconds = 0.0  # that the answers took, which are not the driver's

    async def call(self, method: str, *arguments: Any, urgent: bool = False) -> MicroBatchOutputs:
        started = time.process_time()
        self.calls += 1
        index = arguments[1].index
        answer = MicroBatchOutputs(((index, TokenOutputs(torch.zeros(len(index)), torch.zeros(len(index)))),), {})
        self.seconds += time.process_time() - started
        return answer


def simulate(batch: Batch, ranks: int) -> SimulatedStep:
    """Run the passes of one step over ``ranks`` made-up ranks."""
    cluster: Any = SimulatedCluster()
    actors: Any = [SimulatedRank(f"rank-{number}") for number in range(ranks)]
    rule = SplitRule(ranks=ranks, token_budget=TOKEN_BUDGET)
    requests = {
        name: [ShareRequest(rule=rule, number=number) for number in range(ranks)] for name in ("score", "forward_backward")
    }
    learner = LearnerClient(RankCaller("policy", ActorGroup("learner", actors), cluster, requests))

    async def step() -> None:
        scored: Any = await learner.score(batch)
        await learner.forward_backward(batch.with_column("old_logprobs", scored.logprobs), _no_loss)

    started = time.process_time()
    asyncio.run(step())
    seconds = time.process_time() - started - sum(actor.seconds for actor in actors)
    largest = [max(cluster.sizes[number * ranks : (number + 1) * ranks]) for number in range(PASSES)]
    whole_seconds, share_seconds = cutting_seconds(batch, rule)
    return SimulatedStep(
        ranks=ranks,
        tokens=len(batch.tokens),
        seconds=seconds,
        calls=sum(actor.calls for actor in actors),
        stored_bytes=sum(cluster.sizes),
        rank_bytes=sum(largest),
        whole_bytes=PASSES * len(pickle.dumps(batch, protocol=5)),
        whole_seconds=PASSES * whole_seconds,
        share_seconds=PASSES * share_seconds,
    )


def _no_loss(outputs: Any, batch: Batch) -> Any:
    raise NotImplementedError("made-up ranks compute nothing")


def cutting_seconds(batch: Batch, rule: SplitRule) -> tuple[float, float]:
    """Return the seconds in which rank 0 cuts its micro-batches out of a whole batch, and out of its share."""
    from strop.data.shares import divide_batch

    (share,) = divide_batch(batch, rule, (0,))
    started = time.process_time()
    plan = partition_batch(batch, rule.ranks, rule.token_budget).ranks[0]
    selector = RolloutSelector(batch)
    for part in filter(None, (*plan.trained, *plan.forward_only)):
        selector.select(part)
    middle = time.process_time()
    list(share.micro_batches())
    return middle - started, time.process_time() - middle


def make_batch(prompts: int, *, group: int = GROUP, completion: int = COMPLETION) -> Batch:
    """Return a batch of ``prompts`` groups with random tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, 30_000, (count,), generator=generator)

    def rollout(task: Task, sample: int, prompt: torch.Tensor) -> Rollout:
        length = int(torch.randint(completion // 2, completion * 3 // 2, (1,), generator=generator))
        turn = Turn(
            author="policy",
            tokens=tokens(length),
            text="",
            logprobs=torch.zeros(length),
            versions=torch.zeros(length, dtype=torch.int32),
        )
        return Rollout(task=task, sample=sample, seed=sample, messages=(), prompt=prompt, turns=(turn,))

    groups = []
    for number in range(prompts):
        task, prompt = Task(id=str(number)), tokens(PROMPT)
        rollouts = tuple(rollout(task, sample, prompt) for sample in range(group))
        groups.append(Group(index=number, environment="made up", version=0, rollouts=rollouts))
    return pack(groups)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--prompts", type=int, default=256, help="of the batch that stays the same")
    parser.add_argument("--rollouts-per-rank", type=int, default=8, help="where each rank's part stays the same")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    fixed = make_batch(options.prompts)
    same_batch = [simulate(fixed, ranks) for ranks in options.ranks]
    same_part = [simulate(make_batch(max(1, ranks * options.rollouts_per_rank // GROUP)), ranks) for ranks in options.ranks]
    for title, steps in (("the same batch", same_batch), ("the same part of a batch for each rank", same_part)):
        print(f"\n{title}, {PASSES} passes over it\n")
        print(table(HEADER, [step.row() for step in steps]))
    if options.json is not None:
        results = {"same_batch": [asdict(step) for step in same_batch], "same_part": [asdict(step) for step in same_part]}
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

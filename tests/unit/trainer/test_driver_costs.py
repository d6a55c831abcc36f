"""The driver's work grows no faster than its input: counted in Python operations and in elements of tensors, not in seconds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import strop
from strop.algorithms.base import TokenOutputs
from strop.data.packing import pack
from strop.data.splitting import pack_first_fit, split_micro_batches, split_mini_batches
from strop.learner.client import ColumnSources
from strop.monitoring.rollout_store.rollout_record import make_records, split_by_rollout
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.trainer.mismatch import measure_mismatch
from strop.trainer.step_metrics import batch_metrics, group_metrics
from strop.types import Batch, Group, StepReward
from support.algorithms import grpo
from support.each import each
from support.rollouts import simple_groups

GROUPS, SAMPLES, TOKENS, TIMES = 8, 4, 5, 4
SOURCES = str(Path(strop.__file__).parent)
SLACK = 1.1  # of the growth: a sort takes n log n comparisons


@dataclass
class Work:
    operations: int = 0  # of Python
    elements: int = 0  # read or written by torch


class Elements(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten.index.Tensor:  # reads what it returns of the first argument
            touched = (args[1:], result)
        elif func is aten.index_put_.default:
            touched = args[1:]
        else:
            touched = () if func.is_view or func is aten.detach.default else (args, kwargs, result)
        self.work.elements += sum(value.numel() for value in tree_leaves(touched) if isinstance(value, torch.Tensor))
        return result


@contextmanager
def counted() -> Iterator[Work]:
    work = Work()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        work.operations += event == "opcode"
        return trace

    before = sys.gettrace()
    with Elements(work):
        sys.settrace(trace)
        try:
            yield work
        finally:
            sys.settrace(before)


@dataclass(frozen=True, eq=False)
class Step:
    groups: Sequence[Group]
    batch: Batch
    outputs: TokenOutputs


def make_step(groups: int, samples: int, tokens: int) -> Step:
    made = simple_groups(*((3, (tokens,) * samples) for _ in range(groups)))
    rewarded = [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, step_rewards=(StepReward(0, float(place)), StepReward(tokens - 1, 1.0)))
                for place, rollout in enumerate(group.rollouts)
            ),
        )
        for group in made
    ]
    batch = pack(rewarded, grpo().group_credit(rewarded))
    batch = asyncio.run(ColumnSources(frozenset(), {}).fill(batch, rewarded))
    logprobs = batch.rollout_logprobs + 0.1
    return Step(rewarded, batch, TokenOutputs(logprobs=logprobs, entropy=torch.ones_like(logprobs)))


def step_works(folder: Path) -> dict[str, Callable[[Step], object]]:
    """What the driver does with the groups of a step."""
    StepRelative = pytest.importorskip("strop.extensions.policy_gradients.turn_credit").StepRelative

    def store(step: Step) -> None:
        learner = split_by_rollout(step.outputs.logprobs, step.batch, step.groups)
        records = make_records(1, step.groups, learner_logprobs=learner, decode=lambda tokens: "")
        RolloutStore(folder, "parquet").write(1, records)

    return {
        "pack": lambda step: pack(step.groups, grpo().group_credit(step.groups)),
        "columns": lambda step: asyncio.run(ColumnSources(frozenset(), {}).fill(step.batch, step.groups)),
        "credit of steps": lambda step: StepRelative(leave_one_out=True).token_advantages(step.batch),
        "mini-batches": lambda step: split_mini_batches(step.batch, len(step.groups)),
        "micro-batches": lambda step: split_micro_batches(step.batch, 40),
        "mismatch": lambda step: measure_mismatch(step.batch, step.outputs.logprobs, 1),
        "metrics": lambda step: (group_metrics(step.groups, [], [0]), batch_metrics(step.batch, step.outputs)),
        "split": lambda step: split_by_rollout(step.batch.advantages, step.batch, step.groups),
        "store": store,
    }


GROWN = {"groups": (TIMES, 1, 1), "samples": (1, TIMES, 1), "tokens": (1, 1, TIMES)}
WORKS = ("pack", "columns", "credit of steps", "mini-batches", "micro-batches", "mismatch", "metrics", "split", "store")


@each("work, grown", [(work, grown) for work in WORKS for grown in GROWN])
def test_the_driver_does_no_work_that_grows_faster_than_a_step(tmp_path: Path, work: str, grown: str) -> None:
    """With four times the groups of a step, the rollouts of a group, or the tokens of a rollout."""
    shape, factors = (GROUPS, SAMPLES, TOKENS), GROWN[grown]
    small = make_step(*shape)
    large = make_step(*(size * factor for size, factor in zip(shape, factors, strict=True)))
    do = step_works(tmp_path)[work]
    do(small)  # imports, and caches of the first call
    with counted() as before:
        do(small)
    with counted() as after:
        do(large)
    assert after.operations <= SLACK * TIMES * before.operations, (before, after)
    assert after.elements <= SLACK * TIMES * before.elements, (before, after)


def test_bins_are_found_without_looking_at_each() -> None:
    """As long as a sort, n log n, with as many bins as micro-batches of a large step."""
    few, many = ([([place], 3) for place in range(count)] for count in (512, 4 * 512))
    with counted() as before:
        pack_first_fit(few, 6)
    with counted() as after:
        pack_first_fit(many, 6)
    assert after.operations <= SLACK * TIMES * (11 / 9) * before.operations, (before, after)

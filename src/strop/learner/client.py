"""Awaitable learners, scorers and column sources, for the training loop.

A client has typed awaitable methods, and a caller decides where they run: ``InlineCaller`` in this thread, for a learner that
shares its module with an engine, because the two must alternate on one thread; ``ThreadCaller`` in another thread, while engines in
other processes generate; ``RankCaller`` (``strop.distributed.workers.remote_learner``) on every rank.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from strop.algorithms.base import SQUARED_PROBS, LossFn, Outputs, TokenOutputs, ValueOutputs
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import KL_WEIGHT, KL_WEIGHT_NEXT
from strop.algorithms.policy_gradient.turns import make_step_columns, make_turn_advantages, make_turn_columns
from strop.data.rollout_selector import SubBatch, split_policies
from strop.learner.base import BackwardResult, WeightSource, require_token_outputs
from strop.learner.budget.memory_probe import MemoryProbe
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs
from strop.metrics import Metrics
from strop.monitoring.process_profile import RECORDER
from strop.types import Batch, Group

T = TypeVar("T")


class LearnerThread:
    """A single thread that runs calls one after another, with the torch settings of the thread that created it.

    Torch keeps the number of intra-op threads, the current device and the grad mode per thread. The grad mode is the caller's at each call.
    """

    def __init__(self, name: str = "strop-learner") -> None:
        threads = torch.get_num_threads()
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def prepare() -> None:
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)

        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=prepare)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments)`` in the thread; return its result or raise its exception.

        A cancelled caller first waits for the call in progress, so that nothing is saved or freed while the thread still uses it. A second
        cancellation does not wait.
        """
        context, gradients = contextvars.copy_context(), torch.is_grad_enabled()

        def work() -> T:
            with torch.set_grad_enabled(gradients):
                return function(*arguments)

        future = asyncio.get_running_loop().run_in_executor(self._executor, context.run, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # mark it as retrieved: the caller gets the cancellation
            raise

    def close(self) -> None:
        """Stop the thread after the call in progress, without waiting for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)


POLICY_ENTROPY = "policy_entropy"  # a batch column, [N]: entropy of the policy before the update


class Caller(Protocol):
    """Calls the methods of one learner, scorer or column source, local or remote."""

    async def call(self, method: str, *arguments: Any) -> Any: ...

    def call_sync(self, method: str, *arguments: Any) -> Any:
        """Like ``call``, but block this thread. No other call may be in progress."""
        ...


@dataclass(frozen=True)
class InlineCaller:
    """Calls an object of this process, and blocks the event loop meanwhile."""

    target: Any

    async def call(self, method: str, *arguments: Any) -> Any:
        return self.call_sync(method, *arguments)

    def call_sync(self, method: str, *arguments: Any) -> Any:
        with RECORDER.span("learner", method, type(self.target).__name__):
            return getattr(self.target, method)(*arguments)


@dataclass(frozen=True)
class ThreadCaller(InlineCaller):
    """Calls an object of this process in ``thread``; ``call_sync`` stays in the caller's thread."""

    thread: LearnerThread

    async def call(self, method: str, *arguments: Any) -> Any:
        with RECORDER.span("learner", method, type(self.target).__name__):
            return await self.thread.run(getattr(self.target, method), *arguments)


@dataclass(frozen=True)
class ScorerClient:
    """An awaitable ``Scorer``."""

    caller: Caller

    async def score(self, batch: Batch) -> Outputs:
        outputs: Outputs = await self.caller.call("score", batch)
        return outputs


@dataclass(frozen=True)
class LearnerClient(ScorerClient):
    """An awaitable ``Learner``. ``weights``, ``save`` and ``load`` block."""

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        result: BackwardResult = await self.caller.call("forward_backward", batch, loss)
        return result

    async def evaluate_loss(self, batch: Batch, loss: LossFn) -> BackwardResult:
        result: BackwardResult = await self.caller.call("evaluate_loss", batch, loss)
        return result

    async def step(self) -> Metrics:
        metrics: Metrics = await self.caller.call("step")
        return metrics

    async def probe_memory(self, rollouts: int, length: int) -> MemoryProbe:
        """Measure a pass over synthetic rollouts of ``length`` tokens; with several ranks, return their worst values."""
        probe: MemoryProbe = await self.caller.call("probe_memory", rollouts, length)
        return probe

    async def set_train_tokens(self, tokens: int) -> None:
        """Set the training token budget if the configuration says auto."""
        await self.caller.call("set_train_tokens", tokens)

    def weights(self) -> WeightSource:
        weights: WeightSource = self.caller.call_sync("weights")
        return weights

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.caller.call_sync("save", folder, optimizer)

    def load(self, folder: Path) -> None:
        self.caller.call_sync("load", folder)


def join_outputs(parts: Sequence[tuple[Tensor, Outputs]], size: int) -> Outputs:
    """Join outputs of parts of a batch, each with its index [n] into the batch's ``size`` predicted tokens. A single part is the batch."""
    if len(parts) == 1:
        return parts[0][1]
    return assemble_outputs([MicroBatchOutputs(tuple(parts))], size)


def find_policies(learners: Mapping[str, LearnerClient]) -> dict[str, LearnerClient]:
    """Return the learners of policies: the run's, and those of roles in the order of their numbers (``strop.data.rollout_selector``)."""
    return {name: learner for name, learner in learners.items() if name != "value"}


@dataclass(frozen=True)
class PolicyScorer:
    """Scores each rollout of a batch with the policy that it trains."""

    policies: Sequence[ScorerClient]  # by number (``strop.data.rollout_selector``)

    @classmethod
    def of(cls, learners: Mapping[str, LearnerClient]) -> PolicyScorer:
        return cls(tuple(find_policies(learners).values()))

    async def score(self, batch: Batch) -> Outputs:
        parts = split_policies(SubBatch(batch, torch.arange(len(batch.target))))
        found = [(part.index, await self.policies[number].score(part.batch)) for number, part in parts]
        return join_outputs(found, len(batch.target))


@dataclass(frozen=True)
class MemoryClient:
    """An awaitable ``ModelOffload``."""

    caller: Caller

    async def offload(self) -> None:
        await self.caller.call("offload")

    async def onload(self) -> None:
        await self.caller.call("onload")


class AsyncColumnSource(Protocol):
    """An awaitable ``ColumnSource``."""

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Return columns by name, [N] or [N, K]. ``batch`` was packed from ``groups``."""
        ...


@dataclass(frozen=True)
class ColumnClient:
    """Makes a ``ColumnSource`` awaitable."""

    caller: Caller

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        columns: Mapping[str, Tensor] = await self.caller.call("columns", batch, groups)
        return columns


@dataclass(frozen=True)
class LogprobColumn:
    """The log-probabilities of the sampled tokens under a network, as the column ``name``."""

    name: str
    scorer: ScorerClient

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return {self.name: require_token_outputs(await self.scorer.score(batch)).logprobs}


@dataclass(frozen=True)
class PolicyColumns:
    """The policy's outputs for the sampled tokens before the update, as the columns POLICY_LOGPROBS and POLICY_ENTROPY, and with
    ``squares`` also POLICY_SQUARES.
    """

    policy: ScorerClient | PolicyScorer
    squares: bool = False

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        if self.squares:
            batch = batch.with_column(SQUARED_PROBS, torch.ones(len(batch.target)))
        outputs = require_token_outputs(await self.policy.score(batch))
        columns = {POLICY_LOGPROBS: outputs.logprobs, POLICY_ENTROPY: outputs.entropy, POLICY_SQUARES: outputs.log_sum_sq_probs}
        return {name: column for name, column in columns.items() if column is not None}

    async def outputs(self, batch: Batch) -> Outputs:
        """Return the policy's outputs for a batch, from its columns if they have been filled."""
        if POLICY_ENTROPY in batch.columns:
            return TokenOutputs(batch.column(POLICY_LOGPROBS), batch.column(POLICY_ENTROPY))
        return await self.policy.score(batch)


@dataclass(frozen=True)
class NoColumns:
    """The columns of an algorithm that needs none in this run."""

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return {}


@dataclass(frozen=True)
class ValueColumn:
    """The values that a critic predicts at each sampled token, as the column ``name``."""

    name: str
    scorer: ScorerClient

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        outputs = await self.scorer.score(batch)
        if not isinstance(outputs, ValueOutputs):
            raise TypeError(f"{type(self.scorer).__name__} is not a critic: it returns {type(outputs).__name__}")
        return {self.name: outputs.values}


@dataclass(frozen=True)
class AdaptedKlWeight:
    """The KL_WEIGHT column: the weight of an adaptive KL term, taken from the last step's metrics, which checkpoints hold."""

    first: float
    last_metrics: Callable[[], Mapping[str, float]]

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        weight = self.last_metrics().get(KL_WEIGHT_NEXT, self.first)
        return {KL_WEIGHT: torch.full((len(batch.target),), weight, dtype=torch.float64)}


@dataclass(frozen=True)
class ColumnSources:
    """A source for each required column: a frozen reference, a critic, a teacher, a file."""

    required: frozenset[str]  # ``Algorithm.requires``
    sources: Mapping[str, AsyncColumnSource]

    async def fill(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """Return the batch with all required columns, computed in the order of their names, and with step rewards, and turn
        boundaries if there are several turns. ``batch`` was packed from ``groups``.
        """
        batch = batch.with_columns(
            {
                **make_step_columns(batch, groups),
                **make_turn_columns(batch, groups),
                **make_turn_advantages(batch, groups),
            }
        )
        for name in sorted(self.required):
            batch = batch.with_columns(await self.sources[name].columns(batch, groups))
        return batch

"""Compare the same training in one process and on several ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strop import metrics
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.dpo import DPO
from strop.algorithms.sft import SFT
from strop.data.packing import pack
from strop.models.network import Network
from strop.models.value import ValueNetwork
from strop.models.value_head import ValueHead
from strop.sampling import Sampling
from strop.training.torch.learner import FrozenScorer, TorchLearner, TorchLearnerOptions
from strop.training.torch.master import round_weights
from strop.training.torch.parallel.layout import Meshes, ParallelSizes
from strop.training.torch.parallel.loading import load_once
from strop.training.torch.parallel.placement import Placement
from strop.training.torch.parallel.sharding import parallelize, parallelize_head
from strop.training.torch.parallel.share import Shares, assemble, assemble_outputs
from strop.types import Batch, Group
from support.algorithms import grpo
from support.lora import adapted
from support.models import ExactNorm, build, exact
from support.recorded import build_classifier, random_groups
from support.rollouts import simple_groups, with_columns

SAMPLING = Sampling(temperature=0.8)
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": grpo(kl_penalty=0.1, clip_high=0.28),
    "gspo": grpo(sequence_ratio=True, aggregation="sequence_mean"),
    "sft": SFT(),
    "dpo": DPO(),
}
MANY = ((5, (3, 6, 1)), (2, (6, 2)), (9, (4, 4, 4)), (3, (2, 8)), (1, (7,)), (4, (3, 3)))  # groups: prompt, completions
FEW = ((6, (5, 3, 4, 9)),)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One short training run."""

    sizes: ParallelSizes
    family: str = "llama"
    algorithm: str = "grpo"
    shapes: Sequence[tuple[int, Sequence[int]]] = MANY
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None
    precision: torch.dtype | None = None  # None: the dtype of the weights
    packed: bool = True
    checkpointing: bool = False
    lora: bool = False
    value: bool = False  # train a separate critic
    head: bool = False  # train a critic that is a head on the policy
    loaded_once: bool = False
    rate: float = 1e-2
    train_tokens: int = 40
    sampling: Sampling = SAMPLING
    steps: int = 3
    tensor_plan: Any = None


@dataclass(frozen=True, eq=False)
class Trained:
    """The results of one rank or of the single process."""

    steps: list[Shares]
    stepped: list[dict[str, float]]
    measured: Shares
    scored: Shares
    weights: dict[str, Tensor]
    tied: list[tuple[str, str]]
    adapters: dict[str, Tensor]


def network_of(case: Case, load: Callable[[Callable[[], Any]], Any] = lambda build: build()) -> Network:
    """Build the network. ``load`` loads the model before it is converted to float64 and gets adapters."""
    model = load(lambda: build_classifier(case.family) if case.value else build(case.family))
    model = exact(model) if case.dtype == torch.float64 else model.to(case.dtype)
    for parent in list(model.modules()) if case.dtype == torch.float64 else []:
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("Qwen3MoeRMSNorm", "MixtralRMSNorm"):
                setattr(parent, name, ExactNorm(child.weight, child.variance_epsilon))
    if case.dtype == torch.float64 and case.family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        model.set_experts_implementation("eager")  # grouped matrix products do not support float64
    if case.weights_dtype is not None and case.lora:
        round_weights(model, case.weights_dtype)
    if case.lora:
        model = adapted(model, dim=4)
        _double(model, case.dtype)
    kind = ValueNetwork if case.value else Network
    return kind(model, precision=case.precision or case.dtype, chunk=5, packed=case.packed)


def trainee_of(case: Case, meshes: Meshes | None) -> tuple[Network | ValueHead, Placement | None]:
    """Return the network that a case trains, and its parallelism."""
    network = network_of(case, load_once if case.loaded_once and meshes else lambda build: build())
    placement = None
    if meshes is not None:
        placement = parallelize(network, meshes, weights_dtype=case.weights_dtype, tensor_plan=case.tensor_plan)
    elif case.weights_dtype is not None and not case.lora:
        round_weights(network.model, case.weights_dtype)
    if not case.head:
        return network, placement
    head = ValueHead(network)
    return head, parallelize_head(head, placement) if placement else None


def _double(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        model.double()


def groups_of(case: Case) -> list[Group]:
    if case.algorithm in ("sft", "dpo"):
        return random_groups(len(case.shapes), seed=3)
    groups = simple_groups(*case.shapes)
    if len(groups) > 2:  # one group without signal: its rollouts have zero gradient
        groups[1] = replace(groups[1], rollouts=tuple(replace(rollout, reward=1.0) for rollout in groups[1].rollouts))
    return groups


def batch_of(case: Case) -> Batch:
    """Build the batch with its columns, scored with the initial weights."""
    algorithm = ALGORITHMS[case.algorithm]
    batch = pack(groups_of(case), algorithm)
    plain = network_of(replace(case, value=False, head=False, dtype=torch.float64, weights_dtype=None, precision=None))
    with torch.no_grad():
        logprobs = plain.outputs(batch, case.sampling).logprobs
    noise = torch.Generator().manual_seed(7)
    sampler = logprobs.float() + 0.2 * torch.randn(len(logprobs), generator=noise)
    batch = algorithm.credit(with_columns(replace(batch, sampler_logprobs=sampler), logprobs))
    batch = algorithm.survey(batch, TokenOutputs(logprobs.float(), logprobs.float()) if algorithm.surveys else None)
    return replace(batch, idle=algorithm.idle(batch))


def loss_of(case: Case) -> Any:
    return _value_loss if case.value or case.head else ALGORITHMS[case.algorithm].losses(0)["policy"]


def _value_loss(outputs: Any, batch: Batch) -> Any:
    error = ((outputs.values - batch.advantages) ** 2 * batch.mask).sum() / batch.totals.tokens
    return error, {"loss": metrics.total(error.item())}


def train(case: Case, batch: Batch, meshes: Meshes | None = None) -> Trained:
    network, placement = trainee_of(case, meshes)
    options = TorchLearnerOptions(
        optimizer_kwargs={"lr": case.rate, "weight_decay": 0.1, "eps": 1e-3},
        no_decay=() if case.lora or case.head else ("norm",),
        max_grad_norm=0.3,
        train_tokens=case.train_tokens,
        score_tokens=50,
        activation_checkpointing=case.checkpointing,
        whole_groups=ALGORITHMS[case.algorithm].whole_groups,
    )
    learner = TorchLearner(network, case.sampling, options, placement)
    steps, stepped = [], []
    for _ in range(case.steps):
        steps.append(learner.forward_backward_shares(batch, loss_of(case)))
        stepped.append(metrics.values(asyncio.run(learner.step())))
    measured, scored = learner.measure_shares(batch, loss_of(case)), learner.score_shares(batch)
    weights, tied = {}, []
    places: dict[int, str] = {}
    for name, tensor in learner.weights():
        weights[name] = tensor.detach().clone()
        if (first := places.setdefault(id(tensor) if meshes else tensor.data_ptr(), name)) != name:
            tied.append((first, name))
        places[id(name)] = name  # keeps ids apart
        weights[name + "/held"] = tensor  # so that no other tensor reuses its address
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("/held")}
    adapters = {name: tensor.detach().clone() for name, tensor in learner.adapters()}
    return Trained(steps, stepped, measured, scored, weights, tied, adapters)


def on_rank(rank: int, cases: dict[str, tuple[Case, Batch]]) -> dict[str, Trained]:
    """Train every case on this rank. Only rank 0 returns weights."""
    found = {}
    for name, (case, batch) in cases.items():
        trained = train(case, batch, Meshes(case.sizes, "cpu"))
        found[name] = trained if rank == 0 else replace(trained, weights={}, adapters={})
    return found


def frozen_scores(case: Case, batch: Batch, meshes: Meshes | None) -> Shares:
    network = network_of(case)
    network.model.requires_grad_(False)
    placement = None if meshes is None else parallelize(network, meshes, weights_dtype=case.weights_dtype)
    return FrozenScorer(network, case.sampling, score_tokens=30, placement=placement).score_shares(batch)


@dataclass(frozen=True)
class Differences:
    """The largest relative differences between two trainings."""

    loss: float
    norm: float
    outputs: float
    weights: float
    metrics: float


def compare(ranks: Sequence[Trained], alone: Trained, size: int) -> Differences:
    """Compare ranks with a single process. Raises AssertionError if bitwise-equal results differ between ranks, or names differ."""
    first = ranks[0]
    assert all(rank.stepped == first.stepped for rank in ranks), "all ranks report the same step metrics"
    assert list(first.weights) == list(alone.weights)
    assert first.tied == alone.tied
    losses, norms, outputs, others = [], [], [], []
    runs = [[rank.steps[step] for rank in ranks] for step in range(len(alone.steps))] + [[rank.measured for rank in ranks]]
    for answers, wanted in zip(runs, [*alone.steps, alone.measured], strict=True):
        found, single = assemble(answers, size), assemble([wanted], size)
        extra = found.metrics.keys() - single.metrics.keys()
        assert extra <= {"tokens_per_rank_max_over_mean"}
        for name, metric in single.metrics.items():
            (losses if name == "loss" else others).append(_relative(found.metrics[name].value, metric.value))
        outputs.append(_outputs_differ(found.outputs, single.outputs))
    outputs.append(
        _outputs_differ(assemble_outputs([rank.scored for rank in ranks], size), assemble_outputs([alone.scored], size))
    )
    norms = [_relative(here["grad_norm"], there["grad_norm"]) for here, there in zip(first.stepped, alone.stepped, strict=True)]
    weights = [_tensors_differ(first.weights[name], weight) for name, weight in alone.weights.items()]
    assert first.adapters.keys() == alone.adapters.keys()
    weights += [_tensors_differ(first.adapters[name], weight) for name, weight in alone.adapters.items()]
    return Differences(max(losses), max(norms), max(outputs), max(weights), max(others, default=0.0))


def _relative(left: float, right: float) -> float:
    return abs(left - right) / max(abs(left), abs(right), 1e-3)


def _tensors_differ(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape and left.dtype == right.dtype, (left.dtype, right.dtype)
    return float((left.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-12))


def _outputs_differ(left: Any, right: Any) -> float:
    names = ("logprobs", "entropy") if isinstance(right, TokenOutputs) else ("values",)
    return max(_tensors_differ(getattr(left, name), getattr(right, name)) for name in names)

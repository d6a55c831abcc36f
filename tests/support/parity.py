"""Compare the same training in one process and on several ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor, nn

from strop import metrics
from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import CANDIDATES, Algorithm, TokenOutputs
from strop.data.shares import BatchShare, divide_batch
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs, assemble_result
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.parallel.pipeline.pipelined import parallelize_stages
from strop.learner.parallel.rank_zero_loading import load_on_rank_zero
from strop.learner.parallel.sharded import parallelize_head, parallelize_network
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import NetworkScorer
from strop.models.loading import cast_weights
from strop.models.network import Network, freeze_routers
from strop.models.routing.router_config import NO_ROUTE, RouterLossConfig
from strop.models.value_network import ValueHead, ValueNetwork
from strop.sampling import Sampling
from strop.types import Batch, Group
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.lora import share_fused, with_random_adapters
from support.megatron_families import FAMILIES, make_config, make_exact
from support.models import CONFIGS, VOCABULARY, ExactNorm, build, to_float64
from support.recorded import build_classifier, random_groups
from support.rollouts import make_agent_groups, pack_for, simple_groups, with_columns

SAMPLING = Sampling(temperature=0.8)
DECLARED = {  # by extensions, where they are there
    "sft": "sft",
    "dpo": "dpo",
    "rm": "reward_model",  # of a case with ``value``
    "distillation": "topk_distillation",
}
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": grpo(kl_penalty=0.1, clip_high=0.28),
    "gspo": grpo(sequence_ratio=True, aggregation="sequence_mean"),
    **{name: all_algorithms()[kind]() for name, kind in DECLARED.items() if kind in all_algorithms()},
}
MANY = ((5, (3, 6, 1)), (2, (6, 2)), (9, (4, 4, 4)), (3, (2, 8)), (1, (7,)), (4, (3, 3)))  # groups: prompt, completions
FEW = ((6, (5, 3, 4, 9)),)
MEGATRON = "megatron/"  # before the name of a case of support.megatron_families
for _name in FAMILIES:
    CONFIGS.setdefault(MEGATRON + _name, partial(make_config, _name, vocab_size=VOCABULARY))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One short training run."""

    sizes: ParallelDims
    family: str = "llama"
    layers: int | None = None  # None: those of the family's tiny model
    algorithm: str = "grpo"
    shapes: Sequence[tuple[int, Sequence[int]]] = MANY
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None  # of the ranks
    reshard: bool = True  # ranks free weights and reduce gradients in every micro-batch
    precision: torch.dtype | None = None  # None: the dtype of the weights
    branches: bool = False  # a group with rollouts of an agent that has branches
    packed: bool = True
    checkpointing: bool = False
    lora: bool = False
    fused: bool = False  # adapters share A where Megatron Core has one layer: of queries, keys and values, and of gate and up
    frozen_routers: bool = False
    router_losses: bool = False  # of load balancing and of large logits
    change: Callable[[Network], object] | None = None  # of an extension that changes the policy after it is loaded
    replayed: bool = False  # with recorded experts for most tokens
    value: bool = False  # train a separate critic
    head: bool = False  # train a critic that is a head on the policy
    rank_zero_loading: bool = False
    rate: float = 1e-2
    optimizer: str = "torch.optim.AdamW"
    train_tokens: int = 40
    sampling: Sampling = SAMPLING
    steps: int = 3
    tensor_plan: Any = None
    no_decay: Sequence[str] = ("norm",)


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The results of one rank or of the single process."""

    steps: list[MicroBatchOutputs]
    step_metrics: list[dict[str, float]]
    measured: MicroBatchOutputs
    scored: MicroBatchOutputs
    weights: dict[str, Tensor]
    tied: list[tuple[str, str]]
    adapters: dict[str, Tensor]


def shorter(case: Case) -> Case:
    """The same with two steps at most: the second has the weights and the optimizer's state of the first."""
    return replace(case, steps=min(case.steps, 2))


def build_network(case: Case, load: Callable[[Callable[[], Any]], Any] = lambda build: build()) -> Network:
    """Build the network. ``load`` loads the model before it is converted to float64 and gets adapters."""
    model = load(lambda: build_classifier(case.family) if case.value else build(case.family, layers=case.layers))
    model = to_float64(model) if case.dtype == torch.float64 else model.to(case.dtype)
    for parent in list(model.modules()) if case.dtype == torch.float64 else []:
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("Qwen3MoeRMSNorm", "MixtralRMSNorm", "DeepseekV3RMSNorm"):
                setattr(parent, name, ExactNorm(child.weight, child.variance_epsilon))
    if case.dtype == torch.float64 and case.family.startswith(MEGATRON):
        make_exact(model)
    elif case.dtype == torch.float64 and case.family.removesuffix("_deep") in ("qwen3_moe", "mixtral", "deepseek_v3"):
        model.set_experts_implementation("eager")  # grouped matrix products do not support float64
    if case.weights_dtype is not None and case.lora:
        cast_weights(model, case.weights_dtype)
    if case.lora:
        model = with_random_adapters(model, dim=4, alpha=4 if case.fused else 32)
        if case.fused:
            share_fused(model)
        _double(model, case.dtype)
    if case.frozen_routers:
        assert freeze_routers(model)
    kind = ValueNetwork if case.value else Network
    network = kind(model, precision=case.precision or case.dtype, chunk=5, packed=case.packed)
    if case.replayed:
        network.enable_router_replay()
    if case.change is not None:
        case.change(network)
    return network


def build_trained_network(case: Case, meshes: DeviceMeshes | None) -> tuple[Network | ValueHead, Parallelism | None]:
    """Return the network that a case trains, and its parallelism."""
    network = build_network(case, load_on_rank_zero if case.rank_zero_loading and meshes else lambda build: build())
    placement = None
    if meshes is not None:
        parallelize = parallelize_stages if case.sizes.pipeline > 1 else parallelize_network
        placement = parallelize(
            network,
            meshes,
            weights_dtype=case.weights_dtype,
            gather_dtype=case.gather_dtype,
            tensor_plan=case.tensor_plan,
            reshard_after_forward=case.reshard,
        )
    elif case.weights_dtype is not None and not case.lora:
        cast_weights(network.model, case.weights_dtype)
    if not case.head:
        return network, placement
    head = ValueHead(network)
    return head, parallelize_head(head, placement) if placement else None


def _double(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        model.double()


def make_groups(case: Case) -> list[Group]:
    if case.algorithm in ("sft", "dpo", "rm"):
        return random_groups(len(case.shapes), seed=3)
    groups = [*simple_groups(*case.shapes), *([replace(make_agent_groups()[0], index=len(case.shapes))] if case.branches else [])]
    if len(groups) > 2:  # one group without signal: its rollouts have zero gradient
        groups[1] = replace(groups[1], rollouts=tuple(replace(rollout, reward=1.0) for rollout in groups[1].rollouts))
    return groups


def make_batch(case: Case) -> Batch:
    """Build the batch with its columns, scored with the initial weights."""
    algorithm = ALGORITHMS[case.algorithm]
    batch = pack_for(make_groups(case), algorithm)
    if case.algorithm == "rm":
        return batch
    if case.algorithm == "distillation":
        batch = batch.with_column(
            CANDIDATES, torch.randint(0, 307, (len(batch.target), 5), generator=torch.Generator().manual_seed(9))
        )
    if case.replayed:
        batch = replace(
            batch, read_columns={"routes": random_routes(len(batch.tokens), CONFIGS[case.family]().num_hidden_layers)}
        )
    plain = build_network(replace(case, value=False, head=False, dtype=torch.float64, weights_dtype=None, precision=None))
    with torch.no_grad():
        scored = plain.outputs(batch, case.sampling)
        logprobs = scored.logprobs
    if scored.candidates is not None:
        batch = batch.with_column("teacher_candidates", scored.candidates.float().flip(1) - 0.5)
    noise = torch.Generator().manual_seed(7)
    sampler = logprobs.float() + 0.2 * torch.randn(len(logprobs), generator=noise)
    batch = algorithm.token_credit(with_columns(replace(batch, rollout_logprobs=sampler), logprobs))
    batch = algorithm.prepare_step(
        batch, TokenOutputs(logprobs.float(), logprobs.float()) if algorithm.needs_step_outputs else None
    )
    return replace(batch, zero_gradient=algorithm.zero_gradient(batch))


def random_routes(tokens: int, layers: int) -> Tensor:
    """Return two of four experts for each token in each layer; a tenth of the tokens has none recorded."""
    generator = torch.Generator().manual_seed(3)
    routes = torch.rand(tokens, layers, 4, generator=generator).argsort(-1)[..., :2].to(torch.int8)
    return routes.masked_fill(torch.rand(tokens, 1, 1, generator=generator) < 0.1, NO_ROUTE)


def get_loss(case: Case) -> Any:
    return _value_loss if (case.value and case.algorithm != "rm") or case.head else ALGORITHMS[case.algorithm].losses(0)["policy"]


def _value_loss(outputs: Any, batch: Batch) -> Any:
    error = ((outputs.values - batch.advantages) ** 2 * batch.mask).sum() / batch.totals.tokens
    return error, {"loss": metrics.total(error.item())}


def hand_over(learner: TorchLearner, method: str, batch: Batch) -> Batch:
    """A rank is handed whole batches."""
    return batch


def send_share(learner: TorchLearner, method: str, batch: Batch) -> BatchShare:
    """A rank is sent its share, as the driver divides batches."""
    request = learner.share_requests()[method]
    shares = divide_batch(batch, request.rule)
    share: BatchShare = pickle.loads(pickle.dumps(shares[request.number]))
    return share


def train(
    case: Case, batch: Batch, meshes: DeviceMeshes | None = None, deliver: Callable[..., Any] = hand_over
) -> TrainingResult:
    network, placement = build_trained_network(case, meshes)
    learner = make_torch_learner(
        network,
        case.sampling,
        placement,
        router_losses=RouterLossConfig(aux_loss_coeff=0.3, z_loss_coeff=0.1) if case.router_losses else None,
        optimizer=case.optimizer,
        optimizer_kwargs={"lr": case.rate, "weight_decay": 0.1, "eps": 1e-3},
        no_decay=() if case.lora or case.head else case.no_decay,
        max_grad_norm=0.3,
        train_tokens=case.train_tokens,
        score_tokens=50,
        activation_checkpointing=case.checkpointing,
        whole_groups=ALGORITHMS[case.algorithm].whole_groups,
    )
    steps, stepped = [], []
    for _ in range(case.steps):
        steps.append(learner.forward_backward_local(deliver(learner, "forward_backward", batch), get_loss(case)))
        stepped.append(metrics.to_floats(learner.step()))
    measured = learner.evaluate_loss_local(deliver(learner, "evaluate_loss", batch), get_loss(case))
    scored = learner.score_local(deliver(learner, "score", batch))
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
    return TrainingResult(steps, stepped, measured, scored, weights, tied, adapters)


def train_on_rank(rank: int, cases: dict[str, tuple[Case, Batch]]) -> dict[str, TrainingResult]:
    """Train every case on this rank. Only rank 0 returns weights."""
    found = {}
    for name, (case, batch) in cases.items():
        trained = train(case, batch, DeviceMeshes(case.sizes, "cpu"))
        found[name] = trained if rank == 0 else replace(trained, weights={}, adapters={})
    return found


def frozen_scores(case: Case, batch: Batch, meshes: DeviceMeshes | None) -> MicroBatchOutputs:
    network = build_network(case)
    network.model.requires_grad_(False)
    parallelize = parallelize_stages if case.sizes.pipeline > 1 else parallelize_network
    placement = None if meshes is None else parallelize(network, meshes, weights_dtype=case.weights_dtype)
    return NetworkScorer(network, case.sampling, score_tokens=30, parallelism=placement).score_local(batch)


@dataclass(frozen=True)
class Differences:
    """The largest relative differences between two trainings."""

    loss: float
    norm: float
    outputs: float
    weights: float
    metrics: float


EXACT = Differences(loss=1e-10, norm=1e-10, outputs=1e-6, weights=1e-10, metrics=1e-9)  # of float64


def compare(ranks: Sequence[TrainingResult], single: TrainingResult, size: int) -> Differences:
    """Compare ranks with a single process. Raises AssertionError if bitwise-equal results differ between ranks, or names differ."""
    first = ranks[0]
    assert all(rank.step_metrics == first.step_metrics for rank in ranks), "all ranks report the same step metrics"
    assert list(first.weights) == list(single.weights)
    assert first.tied == single.tied
    losses, norms, outputs, others = [], [], [], []
    runs = [[rank.steps[step] for rank in ranks] for step in range(len(single.steps))] + [[rank.measured for rank in ranks]]
    for answers, wanted in zip(runs, [*single.steps, single.measured], strict=True):
        found, expected = assemble_result(answers, size), assemble_result([wanted], size)
        extra = found.metrics.keys() - expected.metrics.keys()
        assert extra <= {"tokens_per_rank_max_over_mean"}
        for name, metric in expected.metrics.items():
            (losses if name == "loss" else others).append(_relative_difference(found.metrics[name].value, metric.value))
        outputs.append(_output_difference(found.outputs, expected.outputs))
    outputs.append(
        _output_difference(assemble_outputs([rank.scored for rank in ranks], size), assemble_outputs([single.scored], size))
    )
    norms = [
        _relative_difference(here["grad_norm"], there["grad_norm"])
        for here, there in zip(first.step_metrics, single.step_metrics, strict=True)
    ]
    weights = [_tensor_difference(first.weights[name], weight) for name, weight in single.weights.items()]
    assert first.adapters.keys() == single.adapters.keys()
    weights += [_tensor_difference(first.adapters[name], weight) for name, weight in single.adapters.items()]
    return Differences(max(losses), max(norms), max(outputs), max(weights), max(others, default=0.0))


def _relative_difference(left: float, right: float) -> float:
    return abs(left - right) / max(abs(left), abs(right), 1e-3)


def _tensor_difference(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape and left.dtype == right.dtype, (left.dtype, right.dtype)
    return float((left.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-12))


def _output_difference(left: Any, right: Any) -> float:
    names = ("logprobs", "entropy") if isinstance(right, TokenOutputs) else ("values",)
    return max(_tensor_difference(getattr(left, name), getattr(right, name)) for name in names)


def compare_on_ranks(world: int, cases: Mapping[str, Case]) -> Callable[[str], Differences]:
    """Train all cases in one start of ``world`` ranks; return what compares one of them with a single process."""
    trained = {name: (case, make_batch(case)) for name, case in cases.items()}
    ranks = run_on_ranks(world, train_on_rank, trained)

    def differences(name: str) -> Differences:
        case, batch = trained[name]
        return compare([rank[name] for rank in ranks], train(case, batch), len(batch.target))

    return differences

"""Routers that record and replay: their own choice changes nothing, another one gives the log-probabilities of the recorded experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.metrics import Metrics
from strop.models.network import Network
from strop.models.routing.recorded_experts import measure_disagreement, measure_missing_routes, take_replay_counts
from strop.models.routing.router_config import NO_ROUTE, ROUTES
from strop.sampling import Sampling
from strop.types import Batch
from support.each import each
from support.models import _SIZES, build
from support.rollouts import make_agent_groups, pack_grpo, simple_groups

SAMPLING = Sampling()
SHAPES = ((6, (5, 3, 4)), (3, (7, 2)))


def _olmoe() -> Any:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**_SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2))


def _deepseek_v2(method: str = "group_limited_greedy") -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_SIZES | {"num_key_value_heads": 4},
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method=method,
        moe_intermediate_size=24,
    )
    return DeepseekV2ForCausalLM(config)


OTHERS = {"olmoe": _olmoe, "gpt_oss": _gpt_oss, "deepseek_v2": _deepseek_v2}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", *OTHERS)


def build_network(family: str, *, packed: bool | None = None) -> Network:
    torch.manual_seed(0)
    model = OTHERS[family]() if family in OTHERS else build(family)
    if family in OTHERS:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape) * 1.2 / parameter.shape[-1] ** 0.5)
    network = Network(model.eval(), chunk=5, packed=packed)
    network.enable_router_replay()
    return network


def with_routes(batch: Batch, routes: Tensor) -> Batch:
    return replace(batch, read_columns={"routes": routes})


def routes_of(batch: Batch) -> Tensor:
    return batch.read_columns["routes"]


def record(network: Network, batch: Batch) -> Batch:
    """Return the batch with the experts that the network chooses for its tokens."""
    routes: Any = network.record_columns()[ROUTES]
    if network.packed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "_replay", lambda _: {"routes": routes})
            patch.setattr(network, "_count_differences", lambda _: None)
            with torch.no_grad():
                network.hidden(batch)
        return with_routes(batch, routes.stack())
    paths = [path for paths in batch.rollout_paths() for path in paths]
    segments = batch.tokens.split(batch.segment_length.tolist())
    found: dict[int, Tensor] = {}
    for path in paths:
        one: Any = network.record_columns()[ROUTES]
        row = torch.cat([segments[segment] for segment in path])
        with torch.no_grad():
            network.decoder(input_ids=row[None], use_cache=False, routes=one)
        for segment, part in zip(path, one.stack().split([len(segments[segment]) for segment in path]), strict=True):
            found.setdefault(segment, part)
    return with_routes(batch, torch.cat([found[segment] for segment in range(len(segments))]))


def score(network: Network, batch: Batch) -> Tensor:
    with torch.no_grad():
        return network.outputs(batch, SAMPLING).logprobs


def measure(network: Network, batch: Batch) -> Metrics:
    take_replay_counts(network)
    score(network, batch)
    return {
        **measure_missing_routes(network.routed, batch),
        **measure_disagreement(take_replay_counts(network).get("router_disagreement")),
    }


def routers(network: Network) -> list[Any]:
    return [module for module in network.model.modules() if type(module).__name__.startswith("Replayable")]


def other_experts(batch: Batch, seed: int = 0) -> Batch:
    """Replace the recorded experts by random ones, two different ones for each token, where there are any."""
    random = torch.rand(*routes_of(batch).shape[:2], 4, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :2]
    return with_routes(batch, torch.where(routes_of(batch) < 0, routes_of(batch), random.to(torch.int8)))


@each("family", WITH_EXPERTS)
def test_replaying_what_a_network_chooses_changes_nothing(family: str) -> None:
    network = build_network(family)
    batch = record(network, pack_grpo(simple_groups(*SHAPES)))
    assert routes_of(batch).dtype == torch.int8
    assert routes_of(batch).shape[1:] == (2, 2) and bool((routes_of(batch)[:, 1] >= 0).all())
    assert bool((routes_of(batch)[:, 0] == NO_ROUTE).all()) == family.startswith("deepseek")  # its first layer has no experts
    logprobs = score(network, replace(batch, read_columns={}))
    assert torch.equal(score(network, batch), logprobs)
    logged = measure(network, batch)
    assert logged["router_disagreement"].value == 0.0 and logged["tokens_without_routes"].value == 0.0
    assert network.routed is not None
    assert logged["router_disagreement"].weight == len(batch.target) * len(network.routed.top_k)
    ordinary = Network(copy.deepcopy(network.model), chunk=5, packed=network.packed)
    assert torch.equal(score(ordinary, batch), logprobs), "a network without replay ignores routes"


@each("family", WITH_EXPERTS)
def test_recorded_experts_are_weighted_by_the_learners_own_scores(family: str) -> None:
    network = build_network(family)
    batch = other_experts(record(network, pack_grpo(simple_groups(*SHAPES))))
    chosen = score(network, batch)
    assert float((chosen - score(network, replace(batch, read_columns={}))).abs().max()) > 1e-3
    with forced_experts(network, batch, family):
        assert torch.allclose(score(network, replace(batch, read_columns={})), chosen, atol=1e-6)


@contextmanager
def forced_experts(network: Network, batch: Batch, family: str) -> Iterator[None]:
    """Compute with the recorded experts by routers that are written here, a family at a time."""
    rows = routes_of(batch).long()
    if not network.packed:
        segments = rows.split(batch.segment_length.tolist())
        paths = [torch.cat([segments[each] for each in path]) for paths in batch.rollout_paths() for path in paths]
        rows = torch.nn.utils.rnn.pad_sequence(paths, batch_first=True, padding_value=0).flatten(0, 1)
    with pytest.MonkeyPatch.context() as patch:
        for router in routers(network):
            patch.setattr(
                router, "forward", lambda hidden, *_, router=router: weigh(router, hidden, rows[:, router.layer], family)
            )
        yield


def weigh(router: Any, hidden: Tensor, chosen: Tensor, family: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
    match family:
        case "gpt_oss":
            weights = logits.gather(1, chosen).softmax(-1)
        case "deepseek_v3":
            weights = logits.sigmoid().gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights
            weights = weights * router.routed_scaling_factor
        case "deepseek_v2":
            weights = logits.softmax(-1).gather(1, chosen) * router.routed_scaling_factor
        case _:
            weights = logits.softmax(-1).gather(1, chosen)
            normalised = family == "mixtral" or router.norm_topk_prob
            weights = weights / weights.sum(-1, keepdim=True) if normalised else weights
    return logits, weights, chosen


def test_a_changed_router_computes_with_the_recorded_experts() -> None:
    engine, learner = build_network("qwen3_moe"), build_network("qwen3_moe")
    batch = record(engine, pack_grpo(simple_groups(*SHAPES)))
    with torch.no_grad():
        for router in routers(learner):
            router.weight.add_(0.5 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    replayed = score(learner, batch)
    share = measure(learner, batch)["router_disagreement"].value
    own = routes_of(record(learner, batch))
    differs = (own[batch.source, 0].sort(-1).values != routes_of(batch)[batch.source, 0].sort(-1).values).any(-1)
    assert (
        share >= 0.5 * float(differs.double().mean()) > 0
    )  # the first of two layers reads the same hidden states in both passes
    with forced_experts(learner, batch, "qwen3_moe"):
        assert torch.allclose(score(learner, replace(batch, read_columns={})), replayed, atol=1e-6)


def test_tokens_without_routes_choose_for_themselves() -> None:
    network = build_network("qwen3_moe")
    recorded = record(network, pack_grpo(simple_groups(*SHAPES)))
    other = other_experts(recorded)
    first = int(recorded.segment_start[4])  # the first group is recorded, the second is not
    mixed = with_routes(other, torch.cat([routes_of(other)[:first], torch.full_like(routes_of(other)[first:], NO_ROUTE)]))
    expected = torch.where(mixed.source < first, score(network, other), score(network, replace(other, read_columns={})))
    assert torch.equal(score(network, mixed), expected)
    logged = measure(network, mixed)
    assert logged["tokens_without_routes"].value == pytest.approx(float((mixed.source >= first).double().mean()))


@each("family", ("qwen3_moe", "mixtral"))
def test_padded_rows_replay_what_packed_rows_do(family: str) -> None:
    network = build_network(family)
    batch = other_experts(record(network, pack_grpo([*simple_groups(*SHAPES), *make_agent_groups()])))
    expected = score(network, batch)
    padded = Network(network.model, chunk=5, packed=False)
    padded.enable_router_replay()
    assert torch.allclose(score(padded, batch), expected, atol=2e-5)


def test_the_gradient_reaches_the_router_also_where_layers_are_computed_again() -> None:
    network = build_network("qwen3_moe")
    batch = other_experts(record(network, pack_grpo(simple_groups(*SHAPES))))
    gradients = []
    for again in (False, True):
        network.model.train(again)
        if again:
            network.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.model.zero_grad()
        take_replay_counts(network)
        network.outputs(batch, SAMPLING).logprobs.sum().backward()
        gradients.append([router.weight.grad.clone() for router in routers(network)])
        assert measure_disagreement(take_replay_counts(network).get("router_disagreement"))[
            "router_disagreement"
        ].weight == 2 * len(batch.target)
    assert all(float(gradient.abs().max()) > 1e-4 for gradient in gradients[0])
    assert all(torch.allclose(left, right, atol=1e-7) for left, right in zip(*gradients, strict=True))


def test_what_cannot_replay_says_so() -> None:
    with pytest.raises(ValueError, match=r"policy.router_replay.enabled: LlamaForCausalLM has no routers.* set it to false"):
        Network(build("llama"), packed=True).enable_router_replay()
    network = build_network("qwen3_moe")
    batch = record(network, pack_grpo(simple_groups(*SHAPES)))
    with pytest.raises(ValueError, match="of 3 layers and 2 experts a token, and the model has 2 layers and 2"):
        score(network, with_routes(batch, torch.cat([routes_of(batch), routes_of(batch)[:, :1]], 1)))
    layer = network.decoder.layers[1]  # type: ignore[index]
    layer._forward_pre_hooks.clear()  # as a model that keeps its keyword arguments
    with pytest.raises(RuntimeError, match="the router of layer 1 was not reached"):
        score(network, batch)


def test_a_router_without_topk_is_found_when_it_first_runs() -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    torch.manual_seed(0)
    model = PhimoeForCausalLM(PhimoeConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)).eval()
    network = Network(model, packed=True)
    network.enable_router_replay()
    with pytest.raises(RuntimeError, match=r"took the best experts \d times, not once with torch.topk"):
        record(network, pack_grpo(simple_groups(*SHAPES)))

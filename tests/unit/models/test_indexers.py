"""What indexers choose: the rule for equal scores, bitmaps, attention to a choice, and choices of an engine that are replayed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.pipeline.pipeline_stages import PipelineStages
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers.indexers import EVERYTHING, IndexRows, choose_tokens, pack_bits, sees, take_best
from strop.models.network import Network
from strop.models.routing.recorded_experts import measure_disagreement, take_replay_counts
from strop.models.routing.router_config import CHOICES
from strop.sampling import Sampling
from strop.types import Batch
from support.each import each
from support.every_family import build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.torch_engine import Request, make_engine, make_paged_runner, make_runner, run_requests

SAMPLING = Sampling(max_new_tokens=14)
# Branches of a root, a segment of one token, one of none, and a second root.
START, LENGTH, PARENT = (0, 40, 61, 62, 62, 70), (40, 21, 1, 0, 8, 30), (-1, 0, 0, 2, 2, -1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_plan(kernel: Any = "auto") -> TreePlan:
    return TreePlan(*(torch.tensor(column) for column in (START, LENGTH, PARENT)), torch.device("cpu"), kernel)


def index_rows(count: int, heads: int = 3) -> IndexRows:
    total = sum(LENGTH)
    return IndexRows(draw(total, heads, 8), draw(total, 8, seed=1), draw(total, heads, seed=2), count)


def test_of_equal_scores_the_first_ones_are_taken_whatever_the_width_of_the_row() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 3.0, 1.0]])
    assert take_best(scores, 3).tolist() == [[True, True, True, False, False, False], [True, True, False, False, True, False]]
    wider = torch.nn.functional.pad(scores, (0, 500), value=float("-inf"))
    assert torch.equal(take_best(wider, 3)[:, :6], take_best(scores, 3))
    assert bool(take_best(scores, 6).all())


def test_a_bitmap_is_read_at_any_positions() -> None:
    chosen = torch.rand(5, 29, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(chosen, 4)
    assert bits.shape == (5, 4) and bits.dtype == torch.int8
    assert torch.equal(sees(bits, torch.arange(29)), chosen)
    places = torch.tensor([[28, 3], [0, 7], [8, 9], [1, 1], [16, 24]])
    assert torch.equal(sees(bits, places), chosen.gather(1, places))


def test_a_token_chooses_the_best_of_its_path_wherever_its_segment_lies() -> None:
    rows = index_rows(count=7)
    chosen = make_plan().choose(rows, 0)
    scores = (rows.weight[:, :, None] * (rows.query @ rows.key.T).relu()).sum(1)
    for segment, (start, length) in enumerate(zip(START, LENGTH, strict=True)):
        path, above = list(range(start, start + length)), PARENT[segment]
        while above != -1:
            path, above = [*range(START[above], START[above] + LENGTH[above]), *path], PARENT[above]
        for token in range(start, start + length):
            before = path[: path.index(token) + 1]
            wanted = sorted(range(len(before)), key=lambda place: -float(scores[token, before[place]]))[:7]
            found = sees(chosen[token : token + 1], torch.arange(len(before)))[0].nonzero().squeeze(1).tolist()
            assert found == sorted(wanted)
    assert torch.equal(
        make_plan().choose(IndexRows(rows.query[50:80], rows.key, rows.weight[50:80], 7), 0, first=50), chosen[50:80]
    )


def test_a_row_whose_paths_fit_into_the_choice_is_not_scored() -> None:
    assert make_plan().choose(index_rows(count=61), 0).shape == (sum(LENGTH), 0)
    some = make_plan().choose(index_rows(count=60), 0)
    assert bool((some[:61] == EVERYTHING).all(1)[:60].all()) and not bool((some[60] == EVERYTHING).all())


def test_queries_may_have_keys_of_their_own() -> None:
    rows = IndexRows(draw(6, 3, 8), draw(6, 8), draw(6, 3, seed=1), 4)
    keys, positions = draw(6, 20, 8, seed=3), torch.tensor([19, 3, 4, 10, 12, 5])
    together = choose_tokens(rows, positions, keys, 3)
    for place in range(6):
        one = IndexRows(rows.query[place : place + 1], rows.key, rows.weight[place : place + 1], 4)
        assert torch.equal(choose_tokens(one, positions[place : place + 1], keys[place][None], 3)[0], together[place])


@each("kernel", ("plain", "blockwise", "flash", "flex"))
def test_every_kernel_attends_to_what_was_chosen(kernel: str) -> None:
    """The others leave it to blocks; the reference is a mask over the whole row."""
    plan, total = make_plan(kernel), sum(LENGTH)
    chosen = plan.choose(index_rows(count=7), 0)
    rows = [draw(total, 4, 12, seed=3), draw(total, 2, 12, seed=4), draw(total, 2, 8, seed=5)]
    spec, grad = AttentionSpec(0, 0.3, chosen=chosen), draw(total, 4, 8, seed=6)

    def run(attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [row.clone().requires_grad_() for row in rows]
        output = attend(*leaves)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), value)

    visible = sees(chosen, plan.positions) & path_mask()
    for found, wanted in zip(run(lambda *leaves: plan.attend(*leaves, spec)), run(masked), strict=True):
        assert torch.allclose(found, wanted, atol=1e-11)


def path_mask() -> Tensor:
    """[T, T] bool: which tokens are on the path of each."""
    segment_of = torch.arange(len(LENGTH)).repeat_interleave(torch.tensor(LENGTH))
    above = {(segment, segment) for segment in range(len(LENGTH))}
    for segment in range(len(LENGTH)):
        parent = PARENT[segment]
        while parent != -1:
            above.add((segment, parent))
            parent = PARENT[parent]
    related = torch.tensor([[(int(one), int(other)) in above for other in segment_of] for one in segment_of])
    return related & torch.ones(len(segment_of), len(segment_of), dtype=torch.bool).tril()


def test_tokens_attend_to_their_window_and_to_chosen_blocks_that_ended_on_their_path() -> None:
    """A block across a fork is one of each child's. The reference masks all tokens and all blocks of the row."""
    plan, total, size = make_plan(), sum(LENGTH), 4
    blocks = plan.blocks(size)
    ends = blocks.places[:, -1]
    assert torch.equal(ends.sort().values, (plan.positions % size == size - 1).nonzero().squeeze(1))
    assert torch.equal(plan.positions[blocks.places], blocks.index[:, None] * size + torch.arange(size))
    first = blocks.before < 0
    assert torch.equal(plan.positions[ends[blocks.before[~first]]], plan.positions[ends[~first]] - size)
    on_path = path_mask()
    assert bool(on_path[ends[~first], ends[blocks.before[~first]]].all()) and bool(on_path[ends[:, None], blocks.places].all())

    rows = IndexRows(draw(total, 16, 8), draw(len(ends), 8, seed=1), draw(total, 16, seed=2), 5, size, pooled=True)
    chosen = plan.choose(rows, 0)
    ended = on_path[:, ends]
    scores = (rows.weight[:, :, None] * (rows.query @ rows.key.T).relu()).sum(1).masked_fill(~ended, float("-inf"))
    wanted = ended & (scores >= scores.topk(5).values[:, -1:])
    query, key, value = draw(total, 4, 12, seed=3), draw(total + len(ends), 2, 12, seed=4), draw(total + len(ends), 2, 8, seed=5)
    spec = AttentionSpec(0, 0.3, window=7, chosen=chosen, block=size, pooled=True)
    near = on_path & (plan.positions[:, None] - plan.positions < 7)
    wide, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    for option, seen in ((spec, wanted), (replace(spec, chosen=None), ended)):
        masked = torch.einsum("qhd,khd->hqk", query, wide).mul(0.3).masked_fill(~torch.cat([near, seen], 1), float("-inf"))
        reference = torch.einsum("hqk,khd->qhd", masked.softmax(-1), values)
        assert torch.allclose(plan.attend(query, key, value, option), reference, atol=1e-11)


class Averaging(nn.Module):
    """An indexer of the usual form, which scores tokens in another way."""

    def __init__(self, kind: nn.Module) -> None:
        super().__init__()
        self.index_topk, self.layer_idx = kind.index_topk, kind.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        *_: Any,
        past_key_values: Any = None,
    ) -> Tensor:
        scores = torch.matmul(hidden_states, hidden_states.mT).relu().cumsum(-1).tril()
        return scores.topk(min(self.index_topk, scores.shape[-1])).indices


def test_an_indexer_that_scores_otherwise_is_refused_by_its_name() -> None:
    model = build("deepseek_v32")
    model.model.layers[1].self_attn.indexer = Averaging(model.model.layers[1].self_attn.indexer)
    with pytest.warns(UserWarning, match="cannot read packed rows"):
        network = Network(model)
    assert network.fallback is not None and "Averaging of layer 1" in network.fallback


# --- recorded and replayed ---


def make_network(seed: int | None = None, family: str = "glm_moe_dsa") -> Network:
    """Two of its layers have indexers. ``seed``: of other weights of theirs."""
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if seed is not None and "indexer" in name and parameter.dim() == 2:
                parameter.copy_(draw(*parameter.shape, seed=seed) * 0.15)
    network = Network(model)
    network.enable_indexer_replay(64)
    return network


def sample(network: Network, make: Callable[..., Any], choices: int = 2) -> Batch:
    prompts = [[5, 40, 60, 5, 40, 60, 7, 9, 11], [17, 200], [5, 40, 60, 5, 40, 60, 7, 9, 11] * 2]
    requests = [Request(prompt, SAMPLING, seed) for seed, prompt in enumerate((*prompts, prompts[0], prompts[2]))]
    completions = run_requests(make_engine(make(network, length=64, slots=3)), requests)
    for request, found in zip(requests, completions, strict=True):
        read = len(request.prompt) + len(found.tokens) - 1
        assert found.columns[CHOICES].shape == (read, choices, -(-read // 8))
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    return pack_grpo(
        [make_group(rollouts[0], rollouts[3], index=0), *(make_group(rollouts[place], index=place) for place in (1, 2, 4))]
    )


def score(network: Network, batch: Batch) -> Tensor:
    return network.outputs(batch, SAMPLING).logprobs.detach()


@each("make", (make_runner, make_paged_runner))
def test_a_learner_that_would_choose_otherwise_attends_to_what_the_engine_chose(make: Callable[..., Any]) -> None:
    sampler, learner = make_network(seed=7), make_network()
    batch = sample(sampler, make)
    assert float((score(learner, batch) - batch.rollout_logprobs).abs().max()) < 1e-5
    disagreement = measure_disagreement(take_replay_counts(learner)["indexer_disagreement"], "indexer_disagreement")
    assert disagreement["indexer_disagreement"].value > 0.5
    learner.indexed = None
    assert float((score(learner, batch) - batch.rollout_logprobs).abs().max()) > 1e-3


def test_the_learner_s_own_choice_is_what_its_engine_recorded() -> None:
    network = make_network()
    batch = sample(network, make_paged_runner)
    replayed = score(network, batch)
    (counts,) = take_replay_counts(network).values()
    assert counts.tolist()[0] == 0 and counts.tolist()[1] > 0
    network.indexed = None
    assert torch.equal(score(network, batch), replayed)


def test_a_stage_that_begins_with_a_layer_without_an_indexer_of_its_own_is_refused() -> None:
    model = build("glm_moe_dsa", indexer_types=["full", "shared", "shared"])
    with pytest.raises(ValueError, match=r"layer 2 of GlmMoeDsaForCausalLM attends to the tokens that .* an earlier layer chose"):
        PipelineStages(Network(model, packed=True), ParallelDims(pipeline=2))


def test_an_indexer_that_adds_to_its_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("axk2")
    code = sys.modules[type(model.model.layers[0].self_attn.indexer).__module__]
    monkeypatch.setattr(code, "F", SimpleNamespace(**{**vars(functional), "relu": lambda scores: functional.relu(scores + 0.5)}))
    with pytest.warns(UserWarning, match="AXK2Indexer of layer 0 does not choose by the weighted scores of its heads"):
        assert not Network(model).packed

"""Keep-sampling-mask: the engine records what it drew each token from, and whoever scores the token renormalises over that set."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.base import CANDIDATES, TokenOutputs
from strop.generation.base import Completion
from strop.generation.torch.model_runner import RecomputeRunner
from strop.generation.torch.sampler import sample_tokens
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.sampling import KEPT, KEPT_TOKENS, MAX_RECORDED_TOP_K, NO_TOKEN, Sampling, filtered_logits
from strop.types import Batch, Group, Rollout, Turn
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import VOCABULARY, build, copy_gradients, largest_difference, to_float64
from support.packed import history
from support.rollouts import batch_shapes, make_group, make_groups, make_rollout, make_turn, pack_for, with_columns
from support.torch_engine import Request, make_engine, make_runner, run_requests

FLOAT32 = 2e-5  # the order of additions, as in test_sampler_and_learner_agree
EXACT = 1e-9  # float64
RECORDING = {
    "top_k": Sampling(max_new_tokens=14, top_k=6, entropy=True, record_sampling_mask=True),
    "top_k_and_top_p": Sampling(max_new_tokens=14, temperature=1.2, top_k=60, top_p=0.7, entropy=True, record_sampling_mask=True),
    "min_p": Sampling(max_new_tokens=14, top_k=100, min_p=0.2, entropy=True, record_sampling_mask=True),
}
PROMPTS = [[5, 40, 200, 31, 7, 7, 90, 301, 12, 66, 45], [17, 300]]
every_sampling = pytest.mark.parametrize("sampling", RECORDING.values(), ids=RECORDING)


def completions_of(network: Network, sampling: Sampling, runner: Any = None) -> list[tuple[list[int], Completion]]:
    """Three completions of each of two prompts."""
    requests = [Request(prompt, sampling, seed=10 * place + copy) for place, prompt in enumerate(PROMPTS) for copy in range(3)]
    found = run_requests(make_engine(runner or make_runner(network), stop_ids=(2,)), requests)
    return [(list(request.prompt), completion) for request, completion in zip(requests, found, strict=True)]


def rollouts_of(found: Sequence[tuple[list[int], Completion]]) -> list[Rollout]:
    return [make_rollout(prompt, make_turn(answer)) for prompt, answer in found]


def batch_of(found: Sequence[tuple[list[int], Completion]]) -> Batch:
    rollouts = rollouts_of(found)
    return pack_for([make_group(*rollouts[:3], index=0), make_group(*rollouts[3:], index=1)], grpo())


def without_sets(batch: Batch) -> Batch:
    return replace(batch, columns={name: column for name, column in batch.columns.items() if name != KEPT_TOKENS})


def score(network: Network, batch: Batch, sampling: Sampling) -> TokenOutputs:
    outputs = NetworkScorer(network, sampling, score_tokens=30).score(batch)
    assert isinstance(outputs, TokenOutputs)
    return outputs


def plain_logits(network: Network, batch: Batch) -> Tensor:
    """The model's own logits for every predicted token, [N, V]: no packing, no head of Strop's."""
    network.use_native_attention()
    rows = []
    for predicted in range(len(batch.target)):
        path = torch.tensor(history(batch, predicted))
        rows.append(network.model(input_ids=path[None], use_cache=False).logits[0, -1].detach())
    network.use_learner_attention()
    return torch.stack(rows)


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(build("llama"))


@every_sampling
def test_the_recorded_sets_are_those_the_engine_drew_from(network: Network, sampling: Sampling) -> None:
    batch = batch_of(completions_of(network, sampling))
    column = batch.column(KEPT_TOKENS)
    assert column.dtype == torch.int32
    logits = plain_logits(network, batch)
    for place, row in enumerate(column.tolist()):
        recorded = [token for token in row if token != NO_TOKEN]
        wanted = (filtered_logits(logits[place], sampling) > float("-inf")).nonzero().flatten().tolist()
        assert recorded == wanted
        assert row == recorded + [NO_TOKEN] * (len(row) - len(recorded)), "padding stands at the end"
        assert int(batch.target[place]) in recorded
    assert max(len(set(row)) for row in column.tolist()) > 2


def test_nothing_is_recorded_where_it_was_not_asked_for_or_nothing_is_cut(network: Network) -> None:
    asked = Sampling(max_new_tokens=5, record_sampling_mask=True)
    for sampling in (replace(asked, top_k=6, record_sampling_mask=False), asked, replace(asked, top_k=6, temperature=0.0)):
        assert not sampling.records_sampling_mask
        found = completions_of(network, sampling)
        assert not any(completion.columns for _, completion in found)
        assert KEPT_TOKENS not in batch_of(found).columns


def test_recording_does_not_change_what_is_drawn(network: Network) -> None:
    for sampling in RECORDING.values():
        silent = completions_of(network, replace(sampling, record_sampling_mask=False))
        for (_, left), (_, right) in zip(completions_of(network, sampling), silent, strict=True):
            assert left.tokens.tolist() == right.tokens.tolist()
            assert torch.equal(left.logprobs, right.logprobs)
            assert len(left.columns[KEPT]) == len(left.tokens)


def test_rows_that_record_and_rows_that_do_not_are_drawn_side_by_side() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    small, large = (Sampling(top_k=count, record_sampling_mask=True) for count in (3, 9))
    samplings = [small, Sampling(), large, small, Sampling(top_k=3), large]
    drawn = sample_tokens(logits, samplings, [0.5] * 6)
    assert {row: len(kept) for row, kept in drawn.kept.items()} == {0: 3, 2: 9, 3: 3, 5: 9}
    for row, kept in drawn.kept.items():
        alone = sample_tokens(logits[row : row + 1], [samplings[row]], [0.5])
        assert kept.tolist() == alone.kept[0].tolist() == sorted(logits[row].topk(len(kept)).indices.tolist())


def test_tokens_that_tie_with_the_last_one_are_recorded_too() -> None:
    """bfloat16 logits tie often; the distribution that was drawn from has them all."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    drawn = sample_tokens(logits, [Sampling(top_k=2, record_sampling_mask=True)], [0.9])
    assert drawn.kept[0].tolist() == [0, 1, 2, 3]


@every_sampling
def test_sampler_and_learner_agree_to_float_precision(network: Network, sampling: Sampling) -> None:
    found = completions_of(network, sampling)
    batch = batch_of(found)
    outputs = score(network, batch, sampling)
    entropies = torch.cat([completion.entropies for _, completion in found if completion.entropies is not None])
    assert float((outputs.logprobs - batch.rollout_logprobs).abs().max()) < FLOAT32
    assert float((outputs.entropy - entropies).abs().max()) < FLOAT32


def test_sampler_and_learner_agree_through_the_slow_runner_and_padded_rows() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = Network(build("recurrent_gemma"))
    sampling = RECORDING["top_k_and_top_p"]
    batch = batch_of(completions_of(network, sampling, RecomputeRunner(network, max_slots=3, length=48)))
    assert float((score(network, batch, sampling).logprobs - batch.rollout_logprobs).abs().max()) < FLOAT32


@every_sampling
def test_the_ratio_is_never_multiplied_by_the_kept_mass(network: Network, sampling: Sampling) -> None:
    """TRL#6789: a learner that normalises over the whole vocabulary has the kept mass as its ratio. With the recorded sets it cannot, even
    if it knows of no filter."""
    batch = batch_of(completions_of(network, sampling))
    unfiltered = Sampling(temperature=sampling.temperature)
    wrong = (score(network, without_sets(batch), unfiltered).logprobs - batch.rollout_logprobs).exp()
    probabilities = (plain_logits(network, batch) / sampling.temperature).softmax(-1)
    mass = torch.stack(
        [row[kept[kept != NO_TOKEN].long()].sum() for row, kept in zip(probabilities, batch.column(KEPT_TOKENS), strict=True)]
    )
    assert torch.allclose(wrong, mass, atol=1e-4)
    assert float(mass.mean()) < 0.9
    right = (score(network, batch, unfiltered).logprobs - batch.rollout_logprobs).exp()
    assert torch.allclose(right, torch.ones_like(right), atol=FLOAT32)


def test_references_and_teachers_renormalise_over_the_same_set(network: Network) -> None:
    """Another model: its log-probabilities, entropies and those of candidates are of the softmax over the sampler's set."""
    sampling = RECORDING["top_k_and_top_p"]
    batch = batch_of(completions_of(network, sampling))
    teacher = Network(build("qwen3", seed=5))
    column = batch.column(KEPT_TOKENS)
    outsider = torch.tensor([min(set(range(VOCABULARY)) - set(row)) for row in column.tolist()])
    outputs = score(teacher, batch.with_column(CANDIDATES, torch.stack([batch.target, outsider], 1)), sampling)
    logits = plain_logits(teacher, batch) / sampling.temperature
    for place in range(len(column)):
        members = column[place][column[place] != NO_TOKEN].long()
        logs = logits[place, members].log_softmax(0)
        own = float(logs[members.tolist().index(int(batch.target[place]))])
        assert float(outputs.logprobs[place]) == pytest.approx(own, abs=FLOAT32)
        assert float(outputs.entropy[place]) == pytest.approx(float(-(logs.exp() * logs).sum()), abs=FLOAT32)
        assert outputs.candidates is not None
        assert outputs.candidates[place].tolist() == [pytest.approx(own, abs=FLOAT32), float("-inf")]


def with_random_sets(groups: Sequence[Group], seed: int) -> list[Group]:
    """Every sampled token with a set of 1 to 9 tokens around it, of different sizes from turn to turn."""
    generator = torch.Generator().manual_seed(seed)

    def sets(tokens: Tensor) -> Tensor:
        size = int(torch.randint(1, 10, (), generator=generator))
        rows = torch.full((len(tokens), size), NO_TOKEN, dtype=torch.int32)
        for place, token in enumerate(tokens.tolist()):
            others = [other for other in torch.randperm(VOCABULARY, generator=generator)[:size].tolist() if other != token]
            chosen = sorted([token, *others[: int(torch.randint(0, size, (), generator=generator))]])
            rows[place, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        return rows

    def record(turns: Sequence[Turn]) -> tuple[Turn, ...]:
        return tuple(replace(turn, columns={KEPT: sets(turn.tokens)}) if turn.sampled else turn for turn in turns)

    return [
        replace(
            group,
            rollouts=tuple(
                replace(
                    rollout,
                    branches=tuple(replace(branch, turns=record(branch.turns)) for branch in rollout.branches),
                    turns=record(rollout.turns),
                )
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shapes=batch_shapes, budget=st.integers(1, 60), seed=st.integers(0, 5))
def test_the_gradient_is_the_same_however_the_batch_is_cut(shapes: Any, budget: int, seed: int) -> None:
    """Law 1 with recorded sets, in float64: whole or cut, packed or padded, shared prefixes or not."""
    sampling = Sampling(temperature=0.8, top_k=9, record_sampling_mask=True)
    model = to_float64(build("llama"))
    algorithm = grpo(kl_penalty=0.2)
    groups = with_random_sets(make_groups(shapes, seed), seed)

    def gradient(batch: Batch, budget: int, packed: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        network = Network(model, precision=torch.float64, chunk=5, packed=packed)
        make_torch_learner(
            network, sampling, optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 0.0}, train_tokens=budget
        ).forward_backward(batch, algorithm.loss)
        return copy_gradients(model)

    def packed_batch(share: bool) -> Batch:
        batch = pack_for(groups, algorithm, share_prefixes=share)
        with torch.no_grad():
            logprobs = Network(model, precision=torch.float64, packed=True).outputs(batch, sampling).logprobs
        return algorithm.token_credit(with_columns(batch, logprobs))

    shared, alone = packed_batch(True), packed_batch(False)
    shared = shared.with_columns({name: alone.column(name) for name in ("policy_logprobs", "reference_logprobs")})
    assert torch.equal(shared.column(KEPT_TOKENS), alone.column(KEPT_TOKENS))
    wanted = gradient(alone, 10**9, False)
    for batch, size, packed in ((alone, budget, False), (alone, budget, True), (shared, 10**9, True), (shared, budget, True)):
        assert largest_difference(gradient(batch, size, packed), wanted) < EXACT


@pytest.mark.parametrize("top_k", [None, MAX_RECORDED_TOP_K + 1])
def test_sets_without_a_bound_are_refused(top_k: int | None) -> None:
    with pytest.raises(ValueError, match=f"Set top_k to at most {MAX_RECORDED_TOP_K}"):
        Sampling(top_k=top_k, top_p=0.9, record_sampling_mask=True)
    Sampling(top_k=top_k, top_p=0.9)
    Sampling(top_k=MAX_RECORDED_TOP_K, top_p=0.9, record_sampling_mask=True)

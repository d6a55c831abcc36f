"""Speculative decoding in a real vLLM engine: the same distribution as without, whatever the drafts are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from strop.generation.vllm.vllm_config import SpeculationConfig
from strop.sampling import KEPT, Sampling, filtered_logits
from support.engine_contract import while_running
from support.statistics import is_consistent
from support.sweep import sweep
from support.vllm_engines import compute_logprobs, perturb

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = pytest.mark.slow

NGRAM = SpeculationConfig(method="ngram", num_speculative_tokens=3)


KIND = pytest.mark.parametrize("fixture", sweep(["ngram", "drafted"], "drafted"))


def serve_with(room: BackgroundLoop, folder: Any, tokenizer: Any, speculation: SpeculationConfig) -> ServedModel:
    from support.vllm_engines import serve_vllm, served_model

    served = serve_vllm(served_model(), tokenizer, folder, speculation=speculation)
    room.run(served.weights.publish(0))
    return served


@pytest.fixture(scope="module")
def ngram(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    served = serve_with(room, tmp_path_factory.mktemp("ngram"), tokenizer, NGRAM)
    yield served
    room.run(served.close())


@pytest.fixture(scope="module")
def drafted(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    """The draft is the policy itself as it begins: later publishes change the policy alone."""
    from support.vllm_engines import save_model_folder, served_model

    draft = save_model_folder(served_model(), tokenizer, tmp_path_factory.mktemp("draft"), weights=True)
    speculation = SpeculationConfig(method="draft_model", model_name=str(draft), num_speculative_tokens=3)
    served = serve_with(room, tmp_path_factory.mktemp("drafted"), tokenizer, speculation)
    yield served
    room.run(served.close())


def looping(model: Any, length: int = 60) -> tuple[int, ...]:
    """A prompt that ends in a loop which the model would go on with: drafts taken from it are often right."""
    row = torch.arange(40, 60)[None]
    with torch.no_grad():
        for _ in range(length):
            row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
    return tuple(row[0].tolist())


def sample(room: BackgroundLoop, served: ServedModel, prompt: tuple[int, ...], sampling: Sampling, seeds: range) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(served.pool.generate(prompt, sampling=sampling, seed=seed) for seed in seeds))

    return room.run(all_of_them())


def acceptance(served: ServedModel) -> float:
    return served.pool.collect_metrics()["generation/acceptance_rate"]


def exact_joint(model: Any, prompt: tuple[int, ...], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every beginning of ``length`` tokens that the filters leave possible."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = torch.tensor([[*prompt, *begun] for begun in found])
        with torch.no_grad():
            logits = model(rows).logits[:, -1]
        probabilities = filtered_logits(logits, sampling).softmax(-1)
        found = {
            (*begun, token): probability * float(row[token])
            for (begun, probability), row in zip(list(found.items()), probabilities, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    return found


def counts_of(samples: list[Any], cells: dict[tuple[int, ...], float], length: int) -> Tensor:
    places = {cell: place for place, cell in enumerate(cells)}
    counts = torch.zeros(len(cells))
    for completion in samples:
        counts[places[tuple(completion.tokens[:length].tolist())]] += 1
    return counts


def assert_distribution_is_unchanged(room: BackgroundLoop, served: ServedModel, prompt: tuple[int, ...], number: int) -> None:
    sampling = Sampling(temperature=0.9, top_k=3, max_new_tokens=5)
    cells = exact_joint(served.model, prompt, sampling, 4)
    counts = counts_of(sample(room, served, prompt, sampling, range(number)), cells, 4)
    assert is_consistent(counts, torch.tensor(list(cells.values())))


@KIND
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(max_new_tokens=24), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(temperature=0.6, max_new_tokens=24), marks=pytest.mark.exhaustive),
        Sampling(temperature=0.8, top_k=20, top_p=0.8, max_new_tokens=24),
        Sampling(temperature=0.0, max_new_tokens=24),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_policy(
    room: BackgroundLoop, request: pytest.FixtureRequest, fixture: str, sampling: Sampling
) -> None:
    served: ServedModel = request.getfixturevalue(fixture)
    prompt = looping(served.model)
    for completion in sample(room, served, prompt, sampling, range(4)):
        expected = compute_logprobs(served.model, prompt, completion.tokens, sampling)
        assert (completion.logprobs - expected).abs().max() < 2e-4
        assert completion.versions.tolist() == [served.weights.version] * len(completion.tokens)


@KIND
@pytest.mark.exhaustive
def test_the_distribution_is_that_of_the_policy(room: BackgroundLoop, request: pytest.FixtureRequest, fixture: str) -> None:
    served: ServedModel = request.getfixturevalue(fixture)
    served.pool.collect_metrics()
    assert_distribution_is_unchanged(room, served, looping(served.model), 1500)
    rate = acceptance(served)
    print(f"{fixture}: acceptance rate {rate:.2f}")
    assert rate > 0.2


@pytest.mark.exhaustive
@KIND
def test_equal_seeds_give_equal_tokens(room: BackgroundLoop, request: pytest.FixtureRequest, fixture: str) -> None:
    served: ServedModel = request.getfixturevalue(fixture)
    prompt = looping(served.model)
    sampling = Sampling(max_new_tokens=16)
    together = [completion.tokens.tolist() for completion in sample(room, served, prompt, sampling, range(5))]
    alone = [sample(room, served, prompt, sampling, range(seed, seed + 1))[0].tokens.tolist() for seed in range(5)]
    assert alone == together
    assert len(set(map(tuple, alone))) > 1


@pytest.mark.exhaustive
def test_the_kept_tokens_are_recorded_under_speculation(room: BackgroundLoop, ngram: ServedModel) -> None:
    prompt = looping(ngram.model)
    sampling = Sampling(temperature=0.9, top_k=6, record_sampling_mask=True, max_new_tokens=12)
    completion = sample(room, ngram, prompt, sampling, range(1))[0]
    assert ((completion.columns[KEPT] >= 0).sum(1) == 6).all()


def test_a_publish_changes_the_policy_and_not_the_draft(room: BackgroundLoop, drafted: ServedModel) -> None:
    """A draft that was the policy is always right; once the policy has moved it is not, what is sampled is the policy's all the same."""
    prompt, greedy = tuple(range(40, 60)), Sampling(temperature=0.0, max_new_tokens=40)
    drafted.pool.collect_metrics()
    sample(room, drafted, prompt, greedy, range(1))
    assert acceptance(drafted) > 0.95
    perturb(drafted.model, 5, size=0.06)
    room.run(drafted.weights.publish(drafted.weights.version + 1))
    drafted.pool.collect_metrics()
    completion = sample(room, drafted, prompt, greedy, range(1))[0]
    assert (completion.logprobs - compute_logprobs(drafted.model, prompt, completion.tokens, greedy)).abs().max() < 2e-4
    assert acceptance(drafted) < 0.8
    assert_distribution_is_unchanged(room, drafted, prompt, 500)


@pytest.mark.exhaustive
def test_tokens_know_their_version_where_weights_change_under_drafts(room: BackgroundLoop, ngram: ServedModel) -> None:
    prompt, sampling = looping(ngram.model), Sampling(max_new_tokens=120)
    first = ngram.weights.version
    completions = room.run(while_running(ngram, sampling, 3, lambda: perturb(ngram.model, 61), prompt, recompute=True))
    rows = [completion.versions.tolist() for completion in completions]
    assert all(row == sorted(row) and set(row) <= {first, first + 1} for row in rows)
    assert any(set(row) == {first, first + 1} for row in rows), "at least one was running"
    for completion in completions:  # the new weights read everything again, so that they alone decide what comes after
        expected = compute_logprobs(ngram.model, prompt, completion.tokens, sampling)
        new = completion.versions == first + 1
        assert ((completion.logprobs - expected)[new].abs() < 2e-4).all()

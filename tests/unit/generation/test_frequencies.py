"""The sampler's frequencies match the model's probabilities, by chi-square.

A correct sampler fails one of these with probability 3e-6 (4.5 deviations), and seeds are fixed besides.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strop.generation.torch.sampler import sample_tokens
from strop.models.network import Network
from strop.sampling import Sampling, mix_seed, uniform
from support.models import VOCABULARY, build
from support.statistics import chi_square, chi_square_limit, is_consistent
from support.sweep import sweep
from support.torch_engine import Request, make_engine, make_runner, run_requests

DRAWS = 20_000
SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "hot": Sampling(temperature=2.0),
    "top_k": Sampling(top_k=7),
    "top_k_beyond_the_vocabulary": Sampling(top_k=10_000),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.2),
    "top_k_and_top_p": Sampling(top_k=20, top_p=0.9),
    "everything": Sampling(temperature=0.7, top_k=30, top_p=0.95, min_p=0.05),
}


def reference_probabilities(logits: Tensor, sampling: Sampling) -> list[float]:
    """The sampling distribution, slowly: one token at a time, in Python floats. Ties at the k-th place are all kept."""
    scaled = [value / sampling.temperature for value in logits.double().tolist()]
    top = max(scaled)
    mass = [2.718281828459045 ** (value - top) for value in scaled]
    kept = set(range(len(mass)))
    if sampling.top_k is not None:
        least = sorted(mass, reverse=True)[min(sampling.top_k, len(mass)) - 1]
        kept = {token for token in kept if mass[token] >= least}
    if sampling.min_p > 0:
        kept = {token for token in kept if mass[token] >= sampling.min_p * max(mass)}
    if sampling.top_p < 1:
        total, so_far, chosen = sum(mass[token] for token in kept), 0.0, set()
        for token in sorted(kept, key=lambda token: -mass[token]):
            if so_far >= sampling.top_p * total:
                break
            chosen.add(token)
            so_far += mass[token]
        kept = chosen
    total = sum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(mass))]


def drawn_counts(logits: Tensor, sampling: Sampling, *, seed: int = 0, draws: int = DRAWS) -> Tensor:
    numbers = [uniform(mix_seed(seed, place), 0) for place in range(draws)]
    drawn = sample_tokens(logits.expand(draws, -1), [sampling] * draws, numbers)
    wanted = torch.tensor(reference_probabilities(logits, sampling), dtype=torch.float64).log()[drawn.tokens]
    rounding = 2.0**-22 * float(logits[logits.isfinite()].abs().max())  # of a float32 as large as the logits
    assert float((drawn.logprobs - wanted).abs().max()) < 1e-5 + rounding, "the log-probability is that of the reference"
    return torch.bincount(drawn.tokens, minlength=len(logits))


VOCABULARIES = [5, 256, 307, 1000]  # below one block of the sampler, one, between, several
# Each sampling with one vocabulary, and all filters at once, and none, with each.
FEW = {*((name, 307) for name in SAMPLINGS), *(("everything", size) for size in VOCABULARIES)}


CASES = sweep([(name, size) for name in SAMPLINGS for size in VOCABULARIES], *FEW)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_draws_follow_the_distribution(case: tuple[str, int]) -> None:
    name, vocabulary = case
    sampling = SAMPLINGS[name]
    logits = 1.5 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    probabilities = torch.tensor(reference_probabilities(logits, sampling))
    assert is_consistent(drawn_counts(logits, sampling), probabilities)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_draws_follow_the_distribution_of_extreme_logits(scale: float) -> None:
    """Nearly flat, and so steep that almost everything underflows; both far from zero."""
    logits = scale * torch.randn(307, generator=torch.Generator().manual_seed(3)) - 5e3
    assert is_consistent(drawn_counts(logits, Sampling()), torch.tensor(reference_probabilities(logits, Sampling())))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.6)])
def test_a_token_of_logit_minus_infinity_is_never_drawn(sampling: Sampling) -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(4))
    logits[torch.arange(600) % 3 != 0] = float("-inf")
    logits[256:512] = float("-inf")  # a whole block of the sampler
    assert is_consistent(drawn_counts(logits, sampling), torch.tensor(reference_probabilities(logits, sampling)))


@pytest.mark.parametrize("number", [0.0, 1e-12, 0.5, 1 - 2.0**-24, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_find_a_token_that_can_be_drawn(number: float) -> None:
    """1 - 2^-53 is 1 in float32: the search must not run past the last token that has probability."""
    logits = torch.full((1, 700), float("-inf"))
    logits[0, 300:400] = torch.randn(100, generator=torch.Generator().manual_seed(5))
    drawn = sample_tokens(logits, [Sampling()], [number])
    assert 300 <= int(drawn.tokens) < 400
    assert torch.isfinite(drawn.logprobs).all()


def test_greedy_takes_the_likeliest_token_with_certainty() -> None:
    logits = torch.randn(50, 307, generator=torch.Generator().manual_seed(6))
    drawn = sample_tokens(logits, [Sampling(temperature=0.0)] * 50, [0.99] * 50)
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert torch.equal(drawn.logprobs, torch.zeros(50))


def test_rows_with_different_options_are_drawn_as_if_alone() -> None:
    logits = 2 * torch.randn(60, 307, generator=torch.Generator().manual_seed(7))
    options = [replace(sampling, entropy=place % 2 == 0) for place, sampling in enumerate(SAMPLINGS.values())] * 7
    options = [*options[:59], Sampling(temperature=0.0)]
    numbers = [uniform(8, place) for place in range(60)]
    together = sample_tokens(logits, options, numbers)
    for row, (own, number) in enumerate(zip(options, numbers, strict=True)):
        alone = sample_tokens(logits[row : row + 1], [own], [number])
        assert int(alone.tokens) == int(together.tokens[row])
        assert float(alone.logprobs) == pytest.approx(float(together.logprobs[row]), abs=1e-6)
        assert float(alone.entropies) == pytest.approx(float(together.entropies[row]), abs=1e-5)


def test_the_reported_entropy_is_that_of_the_filtered_distribution() -> None:
    logits = 2 * torch.randn(307, generator=torch.Generator().manual_seed(9))
    for sampling in SAMPLINGS.values():
        probabilities = torch.tensor(reference_probabilities(logits, sampling), dtype=torch.float64)
        wanted = torch.special.entr(probabilities).sum()
        drawn = sample_tokens(logits[None], [replace(sampling, entropy=True)], [0.3])
        assert float(drawn.entropies) == pytest.approx(float(wanted), abs=2e-5)
        assert float(sample_tokens(logits[None], [sampling], [0.3]).entropies) == 0.0


def test_the_engine_samples_pairs_of_tokens_as_often_as_the_model_says() -> None:
    """End to end: 3,000 requests of two tokens; the joint distribution over an 8 x 8 grid of buckets of the vocabulary."""
    network = Network(build("llama"))
    prompt, draws = [5, 40, 200], 3000
    sampling = Sampling(temperature=0.8, top_k=60, max_new_tokens=2)
    requests = [Request(prompt, sampling, mix_seed(1, place)) for place in range(draws)]
    completions = run_requests(make_engine(make_runner(network, slots=128, length=8)), requests)
    pairs = torch.stack([completion.tokens for completion in completions])

    network.model.set_attn_implementation("sdpa")
    rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    with torch.no_grad():
        logits = network.model(input_ids=rows).logits
    first = torch.tensor(reference_probabilities(logits[0, 2], sampling))
    second = torch.tensor([reference_probabilities(row, sampling) for row in logits[:, 3]])
    bucket = torch.arange(VOCABULARY) % 8
    joint, counts = torch.zeros(8, 8), torch.zeros(8, 8)
    joint.view(-1).index_add_(0, (8 * bucket[:, None] + bucket[None]).flatten(), (first[:, None] * second).flatten())
    counts.view(-1).index_add_(0, 8 * bucket[pairs[:, 0]] + bucket[pairs[:, 1]], torch.ones(draws))
    statistic, freedom = chi_square(counts.flatten(), joint.flatten())
    assert freedom > 40
    assert statistic < chi_square_limit(freedom)
    assert is_consistent(torch.bincount(pairs[:, 0], minlength=VOCABULARY), first)

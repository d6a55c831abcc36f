"""Options of a request, which tokens they keep, and numbers that depend on identity alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.sampling import Sampling, filtered_logits, keep_mask, kept_logits, mix_seed, pad_kept_tokens, uniform

SEEDS = [16294208416658607535, 756822902802210472, 3976058954295664219]
UNIFORM = 0.1407204796355167

_logits = st.lists(st.integers(-128, 128).map(lambda number: number / 16), min_size=2, max_size=12, unique=True)


def slowly_kept(logits: list[float], sampling: Sampling) -> list[bool]:
    """Top-k and min-p, then top-p of the mass that is left, as vLLM does, by sorting in Python."""
    mass = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    order = sorted(range(len(mass)), key=lambda token: -mass[token])
    candidates = [token for token in order[: sampling.top_k] if mass[token] >= sampling.min_p * mass[order[0]]]
    total, so_far, kept = sum(mass[token] for token in candidates), 0.0, []
    for token in candidates:
        if so_far >= sampling.top_p * total:
            break
        kept.append(token)
        so_far += mass[token]
    return [token in kept for token in range(len(mass))]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    logits=_logits,
    top_k=st.one_of(st.none(), st.integers(1, 15)),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.313, 0.01]),
    min_p=st.sampled_from([0.0, 0.037, 0.311, 1.0]),
)
def test_the_kept_tokens_are_those_of_a_slow_reference(
    logits: list[float], top_k: int | None, top_p: float, min_p: float
) -> None:
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor(logits, dtype=torch.float64)
    wanted = slowly_kept(logits, sampling)
    assert keep_mask(row, sampling).tolist() == wanted
    assert keep_mask(torch.stack([row, row.flip(0)]), sampling).tolist() == [wanted, wanted[::-1]], "rows do not mix"
    assert any(wanted), "the likeliest token is always kept"


def test_top_p_keeps_the_token_that_crosses_the_mass_and_no_more() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_mask(logits, Sampling(top_p=0.6)).tolist() == [True, True, False, False]
    assert keep_mask(logits, Sampling(top_p=0.45)).tolist() == [True, False, False, False]


def test_top_p_looks_at_what_top_k_kept() -> None:
    """Of {0.5, 0.3} renormalised the first has 0.625: it alone reaches 0.6, though it is only half of everything."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_mask(logits, Sampling(top_k=2, top_p=0.6)).tolist() == [True, False, False, False]


def test_tokens_as_likely_as_the_kth_are_all_kept() -> None:
    assert keep_mask(torch.tensor([2.0, 1.0, 1.0, 0.0]), Sampling(top_k=2)).tolist() == [True, True, True, False]


def test_the_distribution_is_renormalised_over_what_is_kept_after_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    found = filtered_logits(logits, Sampling(temperature=0.5, top_k=2)).softmax(-1)
    assert torch.allclose(found, torch.tensor([[0.8808, 0.1192, 0.0, 0.0]]), atol=1e-4)  # 4 and 2 after the temperature


def test_a_token_that_was_drawn_keeps_its_probability_even_if_rounding_would_cut_it() -> None:
    """The learner's logits put token 2 a hair below the k-th: it was drawn, so it was kept."""
    logits = torch.tensor([[2.0, 1.0, 1.0 - 1e-6, -1.0]])
    assert filtered_logits(logits, Sampling(top_k=2))[0, 2] == float("-inf")
    assert torch.isfinite(filtered_logits(logits, Sampling(top_k=2), torch.tensor([2]))[0, 2])


def test_recorded_logits_are_those_of_the_set_after_the_temperature_with_nothing_for_padding() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 5.0, 7.0]])
    kept = pad_kept_tokens([torch.tensor([1, 3]), torch.tensor([0, 1, 2])])
    assert kept.tolist() == [[1, 3, -1], [0, 1, 2]] and kept.dtype == torch.int32
    found = kept_logits(logits, kept, Sampling(temperature=0.5, top_k=1))
    assert found.tolist() == [[2.0, -2.0, float("-inf")], [0.0, 6.0, 10.0]]


def test_sets_are_recorded_only_where_something_is_cut_and_something_is_drawn() -> None:
    asked = Sampling(record_sampling_mask=True)
    assert not asked.records_sampling_mask
    assert replace(asked, top_k=5).records_sampling_mask
    assert not replace(asked, top_k=5, temperature=0.0).records_sampling_mask
    assert not Sampling(top_k=5).records_sampling_mask


def test_half_precision_logits_are_made_float32_and_float64_stays() -> None:
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert filtered_logits(torch.zeros(1, 4, dtype=dtype), Sampling(temperature=0.5, top_p=0.5)).dtype == wanted


def test_filtering_does_not_change_the_logits_it_is_given() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    filtered_logits(logits, Sampling(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1), torch.tensor([1, 2]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1, or null"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_options_that_describe_no_distribution_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_numbers_depend_on_the_whole_identity_and_its_order() -> None:
    identities = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (1, 2, 3), (3, 2, 1), (-1,), (2**63,), (2**64 - 2,)]
    seeds = [mix_seed(*identity) for identity in identities]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_never_change() -> None:
    """A run continues and repeats across versions of Strop only while these stay."""
    assert [mix_seed(), mix_seed(0), mix_seed(42, 7, 3)] == SEEDS
    assert uniform(42, 0) == UNIFORM


def test_uniform_numbers_are_uniform_and_neighbours_independent() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(50)] for seed in range(200)], dtype=torch.float64)
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers.flatten(), 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 60, "chi-square with 19 degrees of freedom, 5 deviations"
    for left, right in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.05, "1 / sqrt(9800) is 0.01"

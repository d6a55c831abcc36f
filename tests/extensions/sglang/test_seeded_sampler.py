"""The sampler that Strop puts into SGLang's scheduler: Strop's distribution, by the seed and the position alone."""

from __future__ import annotations

import pytest
import torch

from strop.extensions.sglang.server.seeded_sampler import draw, filter_probabilities, uniforms
from strop.sampling import Sampling, filtered_logits

VOCABULARY = 40
FILTERS = [
    Sampling(top_k=7),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(top_k=20, top_p=0.8, min_p=0.05),
    Sampling(temperature=0.7, top_k=5, top_p=0.5),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_keep_what_the_learner_keeps(sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(50, VOCABULARY)
    probabilities = (logits / sampling.temperature).softmax(-1)
    rows = len(logits)
    filter_probabilities(
        probabilities,
        torch.full((rows,), sampling.top_k or 1 << 30),
        torch.full((rows,), sampling.top_p),
        torch.full((rows,), sampling.min_p),
        top_p=sampling.top_p < 1,
    )
    assert torch.allclose(probabilities, filtered_logits(logits, sampling).softmax(-1), atol=1e-6)


def test_a_greedy_row_keeps_its_whole_distribution() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    filter_probabilities(probabilities, torch.tensor([1, 2]), torch.ones(2), torch.zeros(2), top_p=False)
    assert torch.allclose(probabilities, torch.tensor([[0.5, 0.3, 0.2], [0.625, 0.375, 0.0]]))


def test_each_row_of_a_batch_has_filters_of_its_own() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    filter_probabilities(probabilities, torch.tensor([2, 1 << 30]), torch.tensor([1.0, 0.5]), torch.zeros(2), top_p=True)
    assert torch.allclose(probabilities, torch.tensor([[0.625, 0.375, 0.0], [1.0, 0.0, 0.0]]))


def test_tokens_are_as_frequent_as_they_are_probable() -> None:
    """Chi-square of 20,000 draws with seeds of their own: 9 degrees of freedom, and 27.9 is exceeded once in a thousand."""
    expected = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005])
    count = 20_000
    for seeds, positions in (
        (torch.arange(count), torch.full((count,), 17)),
        (torch.full((count,), 5), torch.arange(count)),
        (torch.arange(count) << 40, torch.zeros(count, dtype=torch.int64)),
    ):
        tokens = draw(expected.expand(count, -1), uniforms(seeds, positions))
        found = torch.bincount(tokens, minlength=10)
        assert float(((found - count * expected) ** 2 / (count * expected)).sum()) < 27.9


def test_a_draw_depends_on_its_own_row_alone() -> None:
    torch.manual_seed(0)
    probabilities, seeds, positions = torch.randn(9, 30).softmax(-1), torch.arange(9), torch.arange(20, 29)
    together = draw(probabilities, uniforms(seeds, positions))
    alone = [draw(probabilities[row : row + 1], uniforms(seeds[row : row + 1], positions[row : row + 1])) for row in range(9)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_removed_tokens_are_never_drawn_at_the_ends_of_the_interval() -> None:
    probabilities = torch.tensor([[0.0, 0.4, 0.0, 0.6, 0.0]])
    assert draw(probabilities, torch.zeros(1, dtype=torch.float64)).item() == 1
    assert draw(probabilities, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 3

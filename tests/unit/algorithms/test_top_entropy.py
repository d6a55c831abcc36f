"""80/20: only the tokens of largest entropy are trained on."""

from __future__ import annotations

import pytest

from strop.algorithms.policy_gradient.advantages.grpo import GRPO
from strop.algorithms.policy_gradient.top_entropy import TopEntropy
from support.tokens import loss_gradients, make_step

NOW = [[-1.0, -1.0, -1.0], [-1.0, -1.0]]
ENTROPY = [[0.1, 0.9, 0.3], [0.8, 0.2]]


def test_the_asked_share_of_the_step_s_tokens_is_kept() -> None:
    step = make_step(NOW, [1.0, -1.0], entropy=ENTROPY)
    for share, kept in [(0.2, {1}), (0.4, {1, 3}), (0.01, {1}), (1.0, {0, 1, 2, 3, 4})]:
        chosen = TopEntropy(share=share).choose(step.tokens()).tolist()
        assert {place for place, value in enumerate(chosen) if value} == kept


def test_the_others_have_no_gradient_but_still_count_in_the_mean() -> None:
    _, slope, logged = loss_gradients(GRPO(selection=TopEntropy(share=0.4)), make_step(NOW, [1.0, -1.0], entropy=ENTROPY))
    assert slope == pytest.approx([0.0, -0.2, 0.0, 0.2, 0.0])
    assert logged["tokens_selected"] == pytest.approx(0.4)


def test_ties_at_the_threshold_are_all_kept() -> None:
    step = make_step(NOW, [1.0, -1.0], entropy=[[0.5, 0.5, 0.1], [0.5, 0.1]])
    assert TopEntropy(share=0.2).choose(step.tokens()).tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_tokens_that_do_not_count_neither_set_the_threshold_nor_are_kept() -> None:
    step = make_step(NOW, [1.0, -1.0], entropy=[[9.0, 9.0, 9.0], [0.8, 0.2]], kept=[False, True])
    assert TopEntropy(share=0.5).choose(step.tokens()).tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    empty = make_step(NOW, [1.0, -1.0], entropy=ENTROPY, kept=[False, False])
    assert TopEntropy().choose(empty.tokens()).tolist() == [0.0] * 5


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie in"):
        TopEntropy(share=0.0)

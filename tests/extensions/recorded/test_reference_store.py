"""Reference log-probabilities computed once: the same numbers as on the fly, and never those of another example."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import Outputs
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.preference.unpaired import KTO
from strop.extensions.recorded.recorded_scores import (
    GROUPS_PER_PACK,
    ReferenceStore,
    load_or_compute_reference,
    rollout_fingerprint,
)
from strop.learner.client import LogprobColumn
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.runs.models import model_fingerprint
from strop.sampling import Sampling
from strop.types import Batch, Ending, Group, observation_turn
from support.clients import scorer_client
from support.models import build, to_float64
from support.recorded import random_groups, recorded_group, recorded_turn
from support.rollouts import make_group, make_rollout, pack_for


class Counting:
    """A scorer that says how often it was asked."""

    def __init__(self, model: Any = None) -> None:
        self.scorer = NetworkScorer(Network(model or build("llama")), Sampling(), score_tokens=40)
        self.calls = 0

    def score(self, batch: Batch) -> Outputs:
        self.calls += 1
        return self.scorer.score(batch)


def store_of(path: Path, groups: Sequence[Group], scorer: Any, **named: str) -> ReferenceStore:
    identity = {"weights": "w", "data": "d", **named}
    return asyncio.run(load_or_compute_reference(path, lambda: iter(groups), scorer_client(scorer), DPO(), **identity))


def columns(source: Any, groups: Sequence[Group], algorithm: Any = None, *, share: bool = True) -> Tensor:
    batch = pack_for(groups, algorithm or DPO(), share_prefixes=share)
    found = source.columns(batch, groups)
    found = asyncio.run(found) if inspect.iscoroutine(found) else found
    assert set(found) == {REFERENCE_LOGPROBS}
    return found[REFERENCE_LOGPROBS]


@pytest.mark.parametrize("share", [True, False])
def test_it_gives_the_numbers_that_scoring_on_the_fly_gives(tmp_path: Path, share: bool) -> None:
    """In float64, so that only the rounding to float32 at the end can differ, whatever is packed with what."""
    scorer = NetworkScorer(Network(to_float64(build("llama")), precision=torch.float64), Sampling(), score_tokens=40)
    groups = random_groups(9)
    store = store_of(tmp_path / "reference.safetensors", groups, scorer)
    order = [groups[place] for place in (4, 0, 8, 3)]
    for algorithm in (DPO(), KTO()):
        wanted = columns(LogprobColumn(REFERENCE_LOGPROBS, scorer_client(scorer)), order, algorithm, share=share)
        assert torch.allclose(columns(store, order, algorithm, share=share), wanted, atol=0, rtol=2e-7)


def test_it_is_read_back_bit_for_bit_and_nothing_is_computed_again(tmp_path: Path) -> None:
    path, groups, scorer = tmp_path / "logs" / "reference.safetensors", random_groups(GROUPS_PER_PACK + 3), Counting()
    first = store_of(path, groups, scorer)
    assert scorer.calls == 2, "groups are packed together by the chunk"
    assert [file.name for file in path.parent.iterdir()] == ["reference.safetensors"]

    def never() -> Iterator[Group]:
        raise AssertionError("the data need not be read again")
        yield

    again = asyncio.run(load_or_compute_reference(path, never, scorer_client(scorer), DPO(), weights="w", data="d"))
    assert scorer.calls == 2
    assert torch.equal(columns(first, groups), columns(again, groups))
    assert first.spans == again.spans


def test_a_computation_that_was_interrupted_leaves_no_file(tmp_path: Path) -> None:
    class Dying(Counting):
        def score(self, batch: Batch) -> Outputs:
            if self.calls:
                raise KeyboardInterrupt
            return super().score(batch)

    path = tmp_path / "reference.safetensors"
    with pytest.raises(KeyboardInterrupt):
        store_of(path, random_groups(GROUPS_PER_PACK + 1), Dying())
    assert list(tmp_path.iterdir()) == []
    assert len(store_of(path, random_groups(3), Counting()).spans) == 6


def test_an_example_that_is_not_there_or_has_changed_is_an_error(tmp_path: Path) -> None:
    groups = random_groups(3)
    store = store_of(tmp_path / "reference.safetensors", groups, Counting())
    with pytest.raises(LookupError, match="rollout 0 of data:3 in data was not among the examples when"):
        columns(store, random_groups(4))
    elsewhere = [replace(group, environment="other") for group in groups]
    with pytest.raises(LookupError, match="rollout 0 of data:0 in other was not among"):
        columns(store, elsewhere)
    changed = recorded_group([4, 5], [6], [7], index=1)
    with pytest.raises(LookupError, match=r"data:1 in data has other tokens than when .*Remove that file to compute them"):
        columns(store, [changed])


def test_what_is_taught_is_part_of_the_fingerprint() -> None:
    whole = make_rollout([4, 5], recorded_turn([6, 7, 8]))
    others = [
        make_rollout([4, 5, 6], recorded_turn([7, 8])),
        make_rollout([4, 5], recorded_turn([6]), observation_turn([7], ""), recorded_turn([8])),
        make_rollout([4, 5], recorded_turn([6, 7]), recorded_turn([8])),
        make_rollout([4, 5], recorded_turn([6, 7, 9])),
        make_rollout([4, 5], recorded_turn([6, 7])),
    ]
    assert len({rollout_fingerprint(rollout) for rollout in (whole, *others)}) == 6
    assert rollout_fingerprint(whole) == rollout_fingerprint(replace(whole, sample=3, reward=9.0, messages=()))


def test_a_file_of_other_weights_or_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    store_of(path, random_groups(2), Counting())
    with pytest.raises(ValueError, match=r"with other weights \(then 'w', now 'x'\); remove that file"):
        store_of(path, random_groups(2), Counting(), weights="x")
    with pytest.raises(ValueError, match=r"weights .* and data \(then 'd', now 'e'\)"):
        store_of(path, random_groups(2), Counting(), weights="x", data="e")


def test_examples_that_cannot_be_used_or_come_twice_are_left_out(tmp_path: Path) -> None:
    groups = random_groups(3)
    failed = make_group(replace(make_rollout([]), ending=Ending.ERROR, error="too long"), index=9)
    store = store_of(tmp_path / "reference.safetensors", [*groups, failed, *groups], Counting())
    assert len(store.spans) == 6
    assert len(store.logprobs) == sum(rollout.sampled_tokens for group in groups for rollout in group.rollouts)


def test_one_example_may_have_several_companions(tmp_path: Path) -> None:
    """KTO's unrelated completion may be another one in another epoch."""
    first = recorded_group([4, 5], [6, 7], [8])
    second = recorded_group([4, 5], [6, 7], [9, 10])
    scorer = Counting()
    store = store_of(tmp_path / "reference.safetensors", [first, second], scorer)
    for group in (first, second):
        wanted = columns(LogprobColumn(REFERENCE_LOGPROBS, scorer_client(scorer)), [group])
        assert torch.allclose(columns(store, [group]), wanted, atol=1e-5)


def test_an_empty_completion_and_no_data_at_all_are_harmless(tmp_path: Path) -> None:
    groups = [recorded_group([4, 5], [6, 7], []), recorded_group([8], [], [9], index=1)]
    store = store_of(tmp_path / "reference.safetensors", groups, Counting())
    assert len(columns(store, groups)) == 3
    again = asyncio.run(load_or_compute_reference(store.path, tuple, scorer_client(Counting()), DPO(), weights="w", data="d"))
    assert torch.equal(columns(again, groups), columns(store, groups))
    assert not store_of(tmp_path / "nothing.safetensors", [], Counting()).spans


def test_a_batch_that_asks_about_other_places_is_refused(tmp_path: Path) -> None:
    groups = random_groups(2)
    store = store_of(tmp_path / "reference.safetensors", groups, Counting())
    batch = pack_for(groups[:1], DPO())
    with pytest.raises(ValueError, match="the batch predicts"):
        store.columns(batch, groups)


def test_the_fingerprint_of_weights_follows_from_their_values() -> None:
    one, same, other = build("llama"), build("llama"), build("llama", seed=1)
    assert model_fingerprint(one) == model_fingerprint(same)
    assert model_fingerprint(one) != model_fingerprint(other)
    with torch.no_grad():
        next(iter(same.parameters()))[0, 0] += 1e-3
    assert model_fingerprint(one) != model_fingerprint(same)

"""Images of a packed batch: each once, where its tokens are, and never another one's."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch

from strop.data.packing import pack
from strop.data.shares.divide_batch import divide_batch
from strop.data.shares.split_rule import SplitRule
from strop.data.splitting import select_rollouts, split_micro_batches
from strop.types import Batch, Branch, Group, PromptImage, Rollout, Task, Turn, observation_turn

IMAGE = 7  # the token of images


def image(start: int, name: str, length: int = 3) -> PromptImage:
    return PromptImage(start=start, length=length, content=name.encode(), digest=name)


def turn(*tokens: int) -> Turn:
    length = len(tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(tokens),
        text="",
        logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int32),
    )


def rollout(images: Sequence[PromptImage], *turns: Turn, branches: Sequence[Branch] = ()) -> Rollout:
    """A prompt of ten tokens with an image at 2 and one at 6."""
    prompt = torch.tensor([1, 2, IMAGE, IMAGE, IMAGE, 3, IMAGE, IMAGE, IMAGE, 4])
    return Rollout(
        task=Task(id="t"),
        sample=0,
        seed=0,
        messages=(),
        prompt=prompt,
        turns=turns,
        branches=tuple(branches),
        images=tuple(images),
    )


def group(index: int, *rollouts: Rollout) -> Group:
    return Group(index=index, environment="", version=0, rollouts=rollouts)


def seen(batch: Batch) -> list[tuple[int, str]]:
    return [(each.start, each.digest) for each in batch.images]


BOTH = (image(2, "a"), image(6, "b"))


def test_the_images_of_a_shared_prompt_stand_once() -> None:
    batch = pack([group(0, rollout(BOTH, turn(5, 5)), rollout(BOTH, turn(6)))])
    assert seen(batch) == [(2, "a"), (6, "b")]
    assert batch.image_segments == [0, 0]
    flat = pack([group(0, rollout(BOTH, turn(5, 5)), rollout(BOTH, turn(6)))], share_prefixes=False)
    assert seen(flat) == [(2, "a"), (6, "b"), (13, "a"), (17, "b")]


def test_equal_tokens_with_other_images_are_no_shared_prompt() -> None:
    batch = pack([group(0, rollout(BOTH, turn(5, 5)), rollout((image(2, "a"), image(6, "c")), turn(6)))])
    assert seen(batch) == [(2, "a"), (6, "b"), (13, "a"), (17, "c")]
    assert batch.segment_parent.tolist() == [-1, -1]


def test_an_image_after_the_last_sampled_token_is_not_read() -> None:
    observed = observation_turn([8, IMAGE, IMAGE, IMAGE], "", [image(13, "o")])
    batch = pack([group(0, rollout(BOTH, turn(5, 5), observed, turn(6, 6)), rollout(BOTH, turn(5, 5), observed))])
    assert seen(batch) == [(2, "a"), (6, "b"), (13, "o")]


def test_a_branch_has_the_images_of_its_context_and_its_own() -> None:
    observed = observation_turn([8, IMAGE, IMAGE, IMAGE], "", [image(6, "o")])
    left = Branch(parent=0, start=5, turns=(observed, turn(9, 9)))
    alone = Branch(parent=0, start=0, turns=(observation_turn([IMAGE, IMAGE, IMAGE], "", [image(0, "p")]), turn(9)))
    batch = pack([group(0, rollout(BOTH, turn(5, 5), branches=[left, alone]))])
    assert [digest for _, digest in seen(batch)] == ["a", "b", "o", "p"]
    for each in batch.images:
        assert batch.tokens[each.start : each.end].tolist() == [IMAGE] * 3
    flat = pack([group(0, rollout(BOTH, turn(5, 5), branches=[left, alone]))], share_prefixes=False)
    assert [digest for _, digest in seen(flat)] == ["a", "b", "a", "o", "p"]


def test_a_branch_within_an_image_is_refused() -> None:
    cut = Branch(parent=0, start=3, turns=(turn(9, 9),))
    with pytest.raises(ValueError, match="leaves its path within an image"):
        pack([group(0, rollout(BOTH, turn(5, 5), branches=[cut]))])


def test_a_part_of_a_batch_has_its_own_images_in_their_new_places() -> None:
    observed = observation_turn([8, IMAGE, IMAGE, IMAGE], "", [image(13, "o")])
    groups = [
        group(0, rollout((), turn(5, 5))),
        group(1, rollout(BOTH, turn(5, 5)), rollout(BOTH, turn(5, 5), observed, turn(6, 6))),
        group(2, rollout((image(2, "c"), image(6, "d")), turn(5))),
    ]
    batch = pack(groups)
    part = select_rollouts(batch, [2, 3]).batch
    assert [digest for _, digest in seen(part)] == ["a", "b", "o", "c", "d"]
    for each in part.images:
        assert part.tokens[each.start : each.end].tolist() == [IMAGE] * 3
    parts = [each.batch for each in split_micro_batches(batch, 16)]
    assert sorted("".join(sorted(digest for _, digest in seen(each))) for each in parts) == ["", "ab", "abo", "cd"]


def test_a_share_that_travels_has_its_images() -> None:
    batch = pack([group(index, rollout((image(2, f"{index}"), image(6, "b")), turn(5, 5))) for index in range(4)])
    shares = [pickle.loads(pickle.dumps(share)) for share in divide_batch(batch, SplitRule(ranks=2, token_budget=30))]
    digests = [digest for share in shares for _, digest in seen(share.batch)]
    assert sorted(digests) == ["0", "1", "2", "3", "b", "b", "b", "b"]


def test_an_image_past_the_end_of_a_batch_is_an_error() -> None:
    batch = pack([group(0, rollout(BOTH, turn(5, 5)))])
    with pytest.raises(ValueError, match="an image that ends at token"):
        type(batch)(**{**vars(batch), "images": (image(50, "x"),)})

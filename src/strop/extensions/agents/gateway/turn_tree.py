"""The tree of an episode: which requests continue which others, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

import torch

from strop.extensions.agents.gateway.exchange import Exchange
from strop.types import Branch, Message, PromptImage, Rollout, Turn, observation_turn

Images = tuple[PromptImage, ...]


@dataclass(eq=False)
class _Path:
    parent: int
    start: int
    tokens: list[int]  # of the whole path, including its parents
    images: Images  # of the whole path
    turns: list[Turn]
    exchanges: list[Exchange]


def add_turns(rollout: Rollout, exchanges: Sequence[Exchange], messages: tuple[Message, ...] = ()) -> Rollout:
    """Return the rollout with the prompt, turns and branches of its requests, at least one. ``messages``: those of the last one."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.number)
    last, last_context, last_images = ordered[-1], ordered[-1].context, ordered[-1].context_images
    chain = [each for each in ordered[:-1] if _begins(each, last_context, last_images)] + [last]
    main = chain[0]
    paths = [_Path(-1, 0, main.tokens, main.context_images, [main.turn], [main])]
    in_chain = set(map(id, chain))
    for exchange in (*chain[1:], *(each for each in ordered if id(each) not in in_chain)):
        _insert(paths, exchange)
    return replace(
        rollout,
        messages=messages,
        prompt=torch.tensor(main.context, dtype=torch.int64),
        images=main.context_images,
        turns=tuple(_count_messages(paths[0])),
        branches=tuple(Branch(parent=path.parent, start=path.start, turns=tuple(path.turns)) for path in paths[1:]),
    )


def _begins(exchange: Exchange, context: list[int], images: Images) -> bool:
    """Whether a context begins with what the exchange read and sampled."""
    tokens, own = exchange.tokens, exchange.context_images
    return context[: len(tokens)] == tokens and _same_until(own, images, len(tokens)) == len(tokens)


def _insert(paths: list[_Path], exchange: Exchange) -> None:
    context, images = exchange.context, exchange.context_images
    common = [_same_until(images, path.images, count_common(context, path.tokens)) for path in paths]
    best = max(common)
    ends = [index for index, path in enumerate(paths) if common[index] == best == len(path.tokens)]
    if ends:
        path = paths[ends[0]]
    else:
        parent = common.index(best)
        path = _Path(parent, best, context[:best], (), [], [])
        paths.append(path)
    read = len(path.tokens)
    if added := context[read:]:
        path.turns.append(observation_turn(added, exchange.added_text, [each for each in images if each.start >= read]))
    path.turns.append(exchange.turn.with_last_read(len(added) + 1))
    path.tokens, path.images = exchange.tokens, images
    path.exchanges.append(exchange)


def count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter  # they agree before low, and differ at some position before high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle)
    return low


def _same_until(left: Images, right: Images, common: int) -> int:
    """Return how many of ``common`` equal tokens also stand for the same images: the tokens of two images may be equal."""
    for one, other in zip_longest(left, right):
        first = min(each.start for each in (one, other) if each is not None)
        if first >= common:
            break
        if one is None or other is None or (one.start, one.digest) != (other.start, other.digest):
            return first
    return common


def _count_messages(path: _Path) -> list[Turn]:
    """Return the turns of the main path, with the number of messages each of them added, if consistent."""
    added = [after.num_messages - before.num_messages for before, after in pairwise(path.exchanges)]
    if not path.exchanges[-1].num_messages or any(count < 1 for count in added):
        return path.turns
    numbers = iter([0, *(count - 1 for count in added)])
    turns: list[Turn] = []
    for turn in path.turns:
        if turn.sampled:
            between = next(numbers)
            if between and turns and not turns[-1].sampled:
                turns[-1] = replace(turns[-1], num_messages=between)
        turns.append(replace(turn, num_messages=1) if turn.sampled else turn)
    return turns

"""The answered requests of an episode as one rollout: a tree of turns.

The main path is the one that ends with the last request. Every other request continues the path that is a prefix of its context,
or becomes a ``Branch`` of the path with which it shares most tokens. So the context of each request equals the tokens before its
turn, and every sampled token is in exactly one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from strop.gateway.exchange import Exchange
from strop.types import Branch, Rollout, Turn, observation_turn


@dataclass(eq=False)
class _Path:
    parent: int
    start: int
    tokens: tuple[int, ...]  # of the whole path, including its parents
    turns: list[Turn]
    exchanges: list[Exchange]


def add_turns(rollout: Rollout, exchanges: Sequence[Exchange]) -> Rollout:
    """Return the rollout with the prompt, turns, branches and messages of its requests. There must be at least one."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.number)
    last = ordered[-1]
    chain = [each for each in ordered[:-1] if last.context[: len(each.tokens)] == each.tokens] + [last]
    main = chain[0]
    paths = [_Path(-1, 0, main.tokens, [main.turn], [main])]
    for exchange in (*chain[1:], *(each for each in ordered if each not in chain)):
        _insert(paths, exchange)
    turns = _count_messages(paths[0])
    return replace(
        rollout,
        messages=last.messages,
        prompt=torch.tensor(main.context, dtype=torch.int64),
        turns=tuple(turns),
        branches=tuple(Branch(parent=path.parent, start=path.start, turns=tuple(path.turns)) for path in paths[1:]),
    )


def _insert(paths: list[_Path], exchange: Exchange) -> None:
    context = exchange.context
    common = [count_common(context, path.tokens) for path in paths]
    best = max(common)
    ends = [index for index, path in enumerate(paths) if common[index] == best == len(path.tokens)]
    if ends:
        path = paths[ends[0]]
    else:
        parent = common.index(best)
        path = _Path(parent, best, context[:best], [], [])
        paths.append(path)
    if added := context[len(path.tokens) :]:
        path.turns.append(observation_turn(added, exchange.added_text))
    path.turns.append(exchange.turn.with_last_routes(len(added) + 1))
    path.tokens = exchange.tokens
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


def _count_messages(path: _Path) -> list[Turn]:
    """Return the turns of the main path, with the number of messages each of them added, if consistent."""
    added = [len(after.messages) - len(before.messages) for before, after in pairwise(path.exchanges)]
    if not path.exchanges[-1].messages or any(count < 1 for count in added):
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

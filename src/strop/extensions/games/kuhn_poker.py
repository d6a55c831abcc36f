"""Kuhn poker: the smallest poker with bluffs, zero-sum, whose value for the first player is -1/18 (Kuhn 1950).

Each player has one of three cards and has paid one chip. They bet one more chip or pass, in turn; to pass after a bet
folds, to bet calls it. A rollout's reward is what its role won, in chips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from strop.data.sources.source import DataSource
from strop.environments.base import DEFAULT_NUM_TASKS, GeneratedTasks, reward
from strop.extensions.games.text_game import draw_split, read_tag
from strop.extensions.roles.player import Player
from strop.extensions.roles.role_environment import RoleEnvironment
from strop.types import Message, Rollout, Task, user

CARDS = "JQK"
MOVES = ("pass", "bet")
STOP = "</move>"
RULES = (
    "Kuhn poker: the cards are J, Q and K, the highest wins, and each player has paid one chip. Bet one more chip or pass. To pass after a "
    "bet folds, to bet after a bet calls it."
)


@dataclass(frozen=True, kw_only=True)
class Deal(Task):
    cards: str  # of the first player and the second


def pay_first(cards: str, moves: str) -> int | None:
    """Return what the first player has won, in chips, after moves such as "pb"; None if the game goes on."""
    if moves in ("", "p", "b", "pb"):
        return None
    if moves in ("bp", "pbp"):
        return 1 if moves == "bp" else -1
    stake = 1 if moves == "pp" else 2
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def ask_first(card: str, side: int, moves: str) -> Message:
    """Return what a player is asked before its first move."""
    before = {"": "You move first.", "p": "The first player passes.", "b": "The first player bets."}[moves]
    return user(
        f"{RULES} You are the {KuhnPoker.role_names[side]} player, with the card {card}. {before} <move>pass</move> or <move>bet</move>?"
    )


@dataclass(frozen=True, kw_only=True)
class KuhnPoker(RoleEnvironment[Deal]):
    """An answer that is no move passes."""

    role_names: ClassVar[tuple[str, ...]] = ("first", "second")

    def tasks(self, data: DataSource) -> Sequence[Deal]:
        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, draw_split(self._deal, data, 0.0))

    def _deal(self, random: Random) -> Deal:
        cards = "".join(random.sample(CARDS, 2))
        return Deal(id=f"kuhn:{cards}", cards=cards)

    async def play(self, task: Deal, cast: Mapping[str, Player]) -> int:
        """Return what the first player won."""
        moves = ""
        while (won := pay_first(task.cards, moves)) is None:
            side = len(moves) % 2
            message = user("The second player bets.") if moves == "pb" else ask_first(task.cards[side], side, moves)
            said = await cast[self.role_names[side]].say(message, stop_strings=(STOP,))
            moves += "b" if (read_tag(said, "move") or "").strip().lower() == "bet" else "p"
        return won

    @reward(weight=1.0)
    def chips(self, task: Deal, rollout: Rollout) -> int:
        won: int = self.outcome
        return won if rollout.role == "first" else -won

    @reward(weight=0.0)
    def illegal_moves(self, task: Deal, rollout: Rollout) -> int:
        said = (read_tag(turn.content, "move") or "" for turn in rollout.policy_turns)
        return sum(move.strip().lower() not in MOVES for move in said)

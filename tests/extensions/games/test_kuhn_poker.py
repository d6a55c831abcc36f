"""Kuhn poker: its rules, runs that train both players, and the value that they reach."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.fakes import Recorder
from loop.runs import overrides, tiny_config
from strop.config import GrpoRunConfig, load_config
from strop.data.packing import pack
from strop.extensions.games.kuhn_poker import CARDS, MOVES, Deal, KuhnPoker, ask_first, pay_first
from strop.learner.base import require_token_outputs
from strop.models.chat_template import ChatTemplate
from strop.models.loading import load_tokenizer
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.runs.lifecycle import make_checkpoints
from strop.runs.open_run import open_run
from strop.runs.run_algorithm import make_run_algorithm
from strop.trainer.run import TrainingRun
from strop.trainer.train import train
from strop.types import user
from support.games import played
from support.rollouts import make_group, make_rollout, sampled_turn

InfoSet = tuple[str, str]  # a player's card, and the moves before its own
SETS = ([(card, moves) for card in CARDS for moves in ("", "pb")], [(card, moves) for card in CARDS for moves in ("p", "b")])
DEALS = ["".join(deal) for deal in itertools.permutations(CARDS, 2)]
VALUE = -1 / 18
BEGUN = "<move>{}</move>"


def value_of(bets: Mapping[InfoSet, float]) -> float:
    """What the first player wins on average, from the probability of a bet in each information set."""

    def go_on(cards: str, moves: str) -> float:
        if (won := pay_first(cards, moves)) is not None:
            return won
        bet = bets[cards[len(moves) % 2], moves]
        return bet * go_on(cards, moves + "b") + (1 - bet) * go_on(cards, moves + "p")

    return sum(go_on(cards, "") for cards in DEALS) / len(DEALS)


def exploitability_of(bets: Mapping[InfoSet, float]) -> float:
    """What a best response wins beyond the value, on average over both seats."""
    best, worst = (
        choose(value_of({**bets, **dict(zip(own, choice, strict=True))}) for choice in itertools.product((0.0, 1.0), repeat=6))
        for own, choose in zip(SETS, (max, min), strict=True)
    )
    return (best - worst) / 2


def test_the_game_has_the_value_that_kuhn_found() -> None:
    third = 1 / 3
    bets = dict.fromkeys((*SETS[0], *SETS[1]), 0.0)
    bets |= {("Q", "pb"): third, ("K", ""): 0.0, ("K", "pb"): 1.0}  # his solutions with alpha = 0
    bets |= {("J", "p"): third, ("Q", "b"): third, ("K", "p"): 1.0, ("K", "b"): 1.0}
    assert value_of(bets) == pytest.approx(VALUE) and exploitability_of(bets) == pytest.approx(0, abs=1e-12)
    assert value_of({**bets, ("Q", "pb"): 0.0}) < VALUE or exploitability_of({**bets, ("Q", "pb"): 0.0}) > 0.01


@pytest.mark.parametrize(
    ("moves", "won"), [("pp", -1), ("bp", 1), ("bb", -2), ("pbp", -1), ("pbb", -2)]
)  # Q against K
def test_both_players_earn_what_they_won(moves: str, won: int) -> None:
    said = [BEGUN.format("bet" if move == "b" else "pass") for move in moves]
    rollout = played(KuhnPoker(), Deal(id="kuhn:QK", cards="QK"), *said)
    (second,) = rollout.others
    assert (rollout.role, rollout.reward, second.role, second.reward) == ("first", won, "second", -won)
    assert "card Q" in rollout.messages[0].content and "card K" in second.messages[0].content
    assert len(rollout.policy_turns) + len(second.policy_turns) == len(moves)


def test_an_answer_that_is_no_move_passes_and_is_counted() -> None:
    rollout = played(KuhnPoker(), Deal(id="kuhn:KJ", cards="KJ"), "I fold.", BEGUN.format("pass"))
    assert (rollout.reward, rollout.rewards["illegal_moves"], rollout.others[0].rewards["illegal_moves"]) == (1, 1, 0)

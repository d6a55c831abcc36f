"""Kuhn poker: its rules, runs that train both players, and the value that they reach."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from loop.runs import metrics_of, overrides, tiny_config
from strop.config import GrpoRunConfig, load_config
from strop.data.packing import pack
from strop.extensions.games.kuhn_poker import CARDS, MOVES, Deal, KuhnPoker, ask_first, pay_first
from strop.learner.client import find_policies
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.runs.lifecycle import make_tracker
from strop.runs.open_run import open_run
from strop.runs.run_algorithm import make_run_algorithm
from strop.trainer.listeners import RunListener, StepView
from strop.trainer.run import TrainingRun
from strop.trainer.train import train
from strop.types import Group, Rollout, Task, Turn, user
from support.games import played

InfoSet = tuple[str, str]  # a player's card, and the moves before its own
SETS = ([(card, moves) for card in CARDS for moves in ("", "pb")], [(card, moves) for card in CARDS for moves in ("p", "b")])
DEALS = ["".join(deal) for deal in itertools.permutations(CARDS, 2)]
VALUE = -1 / 18
ADAPTERS = "adapter_model.safetensors"
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


@pytest.mark.parametrize(("moves", "won"), [("pp", -1), ("bp", 1), ("bb", -2), ("pbp", -1), ("pbb", -2)])  # Q against K
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


# Whole runs, on a model that writes nothing but moves.


def build_players(folder: Path) -> Path:
    """Save a model with a vocabulary of the game's words, which at first bets as often as it passes and knows nothing."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<pad>", "<end>", "<start>", *map(BEGUN.format, MOVES), "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*specials, *CARDS, "first", "passes", "bets", "The"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(BEGUN.format(move), normalized=False) for move in MOVES])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", additional_special_tokens=["<start>"],
        chat_template="{% for each in messages %}<start>{% if each['role'] == 'assistant' %}{{ each['content'] }}{% else %}"
        "{% set words = each['content'].split('card ')[-1].split(' <')[0].replace('.', '').split() %}{{ words[0] }} {{ words[-1] }}"
        "{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<start>{% endif %}",
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
        initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    moves = torch.tensor([vocabulary[BEGUN.format(move)] for move in MOVES])
    with torch.no_grad():  # each state has a large first entry, which rules out every word but the moves
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = 3.0
        model.lm_head.weight.mul_(0.3)
        model.lm_head.weight[:, 0] = -50.0
        model.lm_head.weight[moves, 0] = 0.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_players(tmp_path_factory.mktemp("players"))


def settings(model: Path, folder: Path, **changes: Any) -> GrpoRunConfig:
    dropped = [key for key in tiny_config(model) if key.startswith(("data.train", "data.val", "env."))]
    own = {
        "policy.max_total_sequence_length": 160,
        "policy.dtensor_cfg.lora_cfg.enabled": True,
        "policy.dtensor_cfg.lora_cfg.dim": 8,
        "policy.optimizer.kwargs.lr": 0.01,
        "policy.train_micro_batch_size": 64,
        "policy.generation.max_new_tokens": 1,
        "policy.generation.top_k": 2,
        "data.train.env_name": "kuhn",
        "data.max_input_seq_length": 100,
        "env.kuhn.type": "kuhn_poker",
        "env.kuhn.roles.second": "own",
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_rollout_turns": 2,
        "grpo.normalize_rewards": False,  # chips of all deals count the same
        "grpo.val_period": 0,
        "checkpointing.metric_name": None,
        "checkpointing.keep_top_k": None,
        "checkpointing.checkpoint_dir": str(folder / "results"),
        "logger.log_dir": str(folder / "logs"),
    }
    return load_config(
        None, overrides({**tiny_config(model), **dict.fromkeys(dropped, ...), **own, **changes}), root=GrpoRunConfig
    ).config


def run_steps(
    config: GrpoRunConfig,
    look: Callable[[TrainingRun], Any] = lambda run: None,
    listen: Callable[[TrainingRun], RunListener] | None = None,
) -> Any:

    async def run_all() -> Any:
        with closing(make_tracker(config)) as tracker:
            async with open_run(config, make_run_algorithm(config), tracker) as run:
                if listen is not None:
                    run.listeners.attached.append(listen(run))
                await train(run)
                found = look(run)
                return await found if asyncio.iscoroutine(found) else found

    return asyncio.run(run_all())


def test_two_adapters_of_one_base_are_trained_saved_and_resumed(players: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    one = {"grpo.max_num_steps": 4, "policy.train_global_batch_size": 8, "policy.optimizer.kwargs.lr": 0.001}
    shared = run_steps(settings(players, whole, **one), list_shared)
    run_steps(settings(players, halves, **{**one, "grpo.max_num_steps": 2}))
    run_steps(settings(players, halves, **one))
    assert shared, "frozen weights are there once"
    first, second = (load_file(whole / "results" / "step_4" / name / "weights" / ADAPTERS) for name in ("policy", "second"))
    assert first.keys() == second.keys() and any(not torch.equal(first[name], second[name]) for name in first)
    for name, wanted in (("policy", first), ("second", second)):
        found = load_file(halves / "results" / "step_4" / name / "weights" / ADAPTERS)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), f"{name} resumes bit for bit"
    logged = metrics_of(halves / "logs")[4]
    assert logged["train/reward/first"] == -logged["train/reward/second"] and logged["train/second_grad_norm"] > 0
    assert logged["train/token_mult_prob_error"] < 1.0001, "each role is sampled with the weights that it trains"
    records = list(RolloutStore(whole / "logs").read(4))
    assert {record.role for record in records} == {"first", "second"}
    assert {record.role for record in records if record.columns.get("trained_policy")} == {"second"}


def list_shared(run: TrainingRun) -> bool:
    first, second = (dict(learner.caller.target.model.named_parameters()) for learner in find_policies(run.learners).values())  # type: ignore[attr-defined]
    return all((first[name] is second[name]) == ("lora" not in name) for name in first)


class Curve(RunListener):
    """Keeps how likely both players bet in each information set after every step, by their models."""

    name = "curve"

    def __init__(self, model: Path, run: TrainingRun) -> None:
        self.bets: list[dict[InfoSet, float]] = []
        self.run = run
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.moves = tokenizer.convert_tokens_to_ids([BEGUN.format(move) for move in MOVES])
        self.scored = [pack([self._answer(ChatTemplate(tokenizer), side, *each, move) for each in SETS[side] for move in self.moves])
                       for side in (0, 1)]  # fmt: skip

    def _answer(self, template: ChatTemplate, side: int, card: str, moves: str, move: int) -> Group:
        prompt = template.encode_prompt((ask_first(card, side, "" if moves == "pb" else moves),))
        if moves == "pb":
            passed = self.moves[:1]
            prompt = [*prompt, *passed, *template.encode_observation((user("The second player bets."),), passed)]
        turn = Turn(
            author="policy",
            tokens=torch.tensor([move]),
            text="",
            logprobs=torch.zeros(1),
            versions=torch.zeros(1, dtype=torch.int32),
        )
        rollout = Rollout(task=Task(id="asked"), sample=0, seed=0, messages=(), prompt=torch.tensor(prompt), turns=(turn,))
        return Group(index=0, environment="", version=0, rollouts=(rollout,))

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        found: dict[InfoSet, float] = {}
        for sets, batch, policy in zip(SETS, self.scored, find_policies(self.run.learners).values(), strict=True):
            moves = (await policy.score(batch)).logprobs.exp().view(-1, 2)
            assert (moves.sum(1) > 0.999).all(), "the models write nothing but moves"
            found |= dict(zip(sets, moves[:, 1].tolist(), strict=True))
        self.bets.append(found)
        return {"kuhn/value": value_of(found), "kuhn/exploitability": exploitability_of(found)}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # 400 steps of 96 games: two and a half minutes of one core
def test_two_trained_players_reach_the_value_of_the_game(players: Path, tmp_path: Path) -> None:
    """The policies of single steps circle the solution; their average comes near it (Brown 1951), as does its exploitability."""
    steps, averaged = 400, 200
    changes = {
        "policy.dtensor_cfg.lora_cfg.enabled": False,  # all weights
        "policy.optimizer.name": "torch.optim.SGD",  # without momentum, with which Adam's players circled far out
        "policy.optimizer.kwargs.lr": 0.05,
        "policy.generation.keep_sampling_mask": True,  # the entropy is of the two moves
        "loss_fn.entropy_bonus": 0.1,
        "grpo.num_prompts_per_step": 12,
        "grpo.num_generations_per_prompt": 8,
        "grpo.max_num_steps": steps,
        "checkpointing.save_period": steps,
        "logger.rollouts": "none",
    }
    curve = run_steps(
        settings(players, tmp_path, **changes), lambda run: run.listeners.attached[-1], lambda run: Curve(players, run)
    )
    assert isinstance(curve, Curve) and len(curve.bets) == steps
    average = {each: sum(bets[each] for bets in curve.bets[-averaged:]) / averaged for each in curve.bets[0]}
    assert value_of(average) == pytest.approx(VALUE, abs=0.02)
    assert exploitability_of(average) < 0.06, "it was about 0.57 at the start"

"""One rollout: turns in tokens, how it ends, and what becomes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from loop.fakes import FakeGenerator, Request
from loop.tiny import tiny_tokenizer
from strop.base_config import validate_section
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_episode, run_group
from strop.rollouts.reward_shaping_config import RewardPenaltiesConfig, RewardScalingConfig
from strop.sampling import KEPT, Sampling
from strop.types import Ending, Group, Message, Messages, Rollout, Task, assistant, user
from strop.weight_sync.base import EngineDied

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
END = TOKENIZER.eos_token_id
TASK = Task(id="t", question="guess", answer="12")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


@dataclass(frozen=True, kw_only=True)
class Talk(Environment[Task]):
    """Answers each turn with the next of ``replies``; ``fails`` names the method that raises."""

    replies: tuple[str, ...] = ()
    fails: str = ""
    log: list[str] = field(default_factory=list)

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [TASK]

    def _visit(self, name: str) -> None:
        self.log.append(name)
        if name == self.fails:
            raise LookupError(f"{name} lost its notes")

    def prompt(self, task: Task) -> Messages:
        self._visit("prompt")
        return (user(task.question),)

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        self._visit("respond")
        assert rollout.ending is None and not rollout.rewards
        turn = len(rollout.policy_turns) - 1
        return (user(self.replies[turn]),) if turn < len(self.replies) else None

    def session(self, task: Task) -> Any:
        @asynccontextmanager
        async def opened() -> AsyncIterator[None]:
            self._visit("enter")
            try:
                yield
            finally:
                self._visit("exit")

        return opened()

    @reward(weight=2.0)
    def turns(self, task: Task, rollout: Rollout) -> int:
        self._visit("reward")
        return len(rollout.policy_turns)


def says(*texts: str, end: bool = True):
    """A generator that says one text a turn, each as single characters and an end token."""

    def script(request: Request) -> tuple[list[int], bool]:
        turn = request.prompt.count(TOKENIZER.convert_tokens_to_ids("<|im_start|>")) // 2 - 1
        characters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in texts[turn]]
        return [*characters, *([END] if end else [])], end

    return FakeGenerator(TOKENIZER, script)


def play(
    environment: Environment[Any],
    generator: Any,
    *,
    max_new_tokens: int = 20,
    seed: int = 3,
    sampling: Sampling | None = None,
    **rules: Any,
) -> Rollout:
    return asyncio.run(
        run_episode(
            LocalEnvironment(environment),
            TASK,
            1,
            seed,
            generator=generator,
            template=TEMPLATE,
            sampling=sampling or Sampling(max_new_tokens=max_new_tokens),
            rules=EpisodeRules(**{"max_length": 200, **rules}),
        )
    )


async def run_talk(
    environment: Environment[Any],
    generator: Any,
    *,
    index: int = 0,
    samples: int = 3,
    seed: int = 1,
    baseline: bool = False,
    **rules: Any,
) -> Group:
    """Run a group of the task, and with ``baseline`` a greedy rollout beside it."""
    return await run_group(
        index, "talk", LocalEnvironment(environment), TASK, samples=samples, generator=generator, template=TEMPLATE, seed=seed,
        sampling=Sampling(max_new_tokens=9), rules=EpisodeRules(**{"max_length": 100, **rules}), greedy_baseline=baseline,
    )  # fmt: skip


def play_group(environment: Environment[Any], generator: Any, **options: Any) -> Group:
    return asyncio.run(run_talk(environment, generator, **options))


def test_a_single_turn_is_a_prompt_and_what_the_generator_returned():
    generator = says("12")
    rollout = play(Talk(), generator)
    assert rollout.prompt.tolist() == TEMPLATE.encode_prompt((user("guess"),)) == generator.requests[0].prompt
    (turn,) = rollout.turns
    assert turn.sampled and turn.tokens.tolist() == [*TOKENIZER.convert_tokens_to_ids(["1", "2"]), END]
    assert turn.logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8] and turn.versions.tolist() == [0, 0, 0]
    assert rollout.ending == Ending.STOP and rollout.error is None
    assert (rollout.reward, rollout.rewards) == (2.0, {"turns": 1.0})
    assert rollout.messages == (user("guess"), assistant("12"))
    assert (rollout.sample, rollout.seed, rollout.text) == (1, 3, "12")


def test_several_turns_are_appended_as_tokens_and_never_tokenised_again():
    generator = says("12", "34", "th")
    rollout = play(Talk(replies=("no 12", "34?")), generator, max_turns=3)
    assert [turn.author for turn in rollout.turns] == ["policy", "environment", "policy", "environment", "policy"]
    sampled = [[*TOKENIZER.convert_tokens_to_ids(list(text)), END] for text in ("12", "34", "th")]
    between = [TEMPLATE.encode_observation((user(text),), [END]) for text in ("no 12", "34?")]
    expected = [*rollout.prompt.tolist(), *sampled[0], *between[0], *sampled[1], *between[1], *sampled[2]]
    assert rollout.tokens().tolist() == expected
    assert rollout.tokens().tolist() != TEMPLATE.encode_prompt(rollout.messages)[: len(expected)], "the text has other tokens"
    for before, request in enumerate(generator.requests):
        parts = [rollout.prompt, *(turn.tokens for turn in rollout.turns[: 2 * before])]
        assert request.prompt == torch.cat(parts).tolist()
    for turn in rollout.turns:
        assert len(turn.logprobs) == len(turn.versions) == len(turn.tokens)
        assert turn.sampled or (not turn.logprobs.any() and (turn.versions == -1).all())
    assert [message.content for message in rollout.messages] == ["guess", "12", "no 12", "34", "34?", "th"]
    assert rollout.ending == Ending.STOP and rollout.reward == 6.0
    assert rollout.sampled_tokens == 9 and rollout.length == len(expected)


def test_the_turns_of_a_conversation_share_a_session_and_have_seeds_of_their_own():
    generator = says("1", "2")
    play(Talk(replies=("no",)), generator, max_turns=3)
    first, second = generator.requests
    assert first.session == second.session != ""
    assert first.seed != second.seed
    alone = says("1")
    play(Talk(), alone)
    assert alone.requests[0].session == "", "a single turn caches nothing"


def test_a_turn_of_the_maximum_length_ends_the_rollout_and_asks_nobody():
    environment = Talk(replies=("no",))
    rollout = play(environment, says("1234", end=False), max_new_tokens=2, max_turns=3)
    assert rollout.ending == Ending.LENGTH and rollout.truncated
    assert "respond" not in environment.log and rollout.rewards == {"turns": 1.0}


PROMPT = len(TEMPLATE.encode_prompt((user("guess"),)))
ANSWERED = PROMPT + 2 + len(TEMPLATE.encode_observation((user("no"),), [END]))


@pytest.mark.parametrize(
    ("replies", "said", "rules", "turns", "ending"),
    [
        ("", "12", {"max_length": PROMPT + 3}, 1, Ending.STOP),  # the end token is the last that fits
        ("", "12", {"max_prompt_length": PROMPT}, 1, Ending.STOP),
        ("no", "1 2", {"max_turns": 2, "max_length": ANSWERED}, 1, Ending.CONTEXT),  # an answer needs room for a turn after it
        ("no", "1 2", {"max_turns": 2, "max_length": ANSWERED + 1}, 3, Ending.CONTEXT),
        ("no", "1 2", {"max_turns": 2, "max_length": ANSWERED + 2}, 3, Ending.STOP),
        ("a_long_observation", "1", {"max_turns": 2, "max_length": PROMPT + 7}, 1, Ending.CONTEXT),
        ("no no no", "1 2 3", {"max_turns": 2}, 3, Ending.TURNS),  # the environment would go on
        ("no", "1 2", {"max_turns": 2}, 3, Ending.STOP),
    ],
)
def test_a_rollout_ends_where_nothing_more_fits(
    replies: str, said: str, rules: dict[str, int], turns: int, ending: Ending
) -> None:
    rollout = play(Talk(replies=tuple(replies.split())), says(*said.split()), **rules)
    assert (len(rollout.turns), rollout.ending, rollout.error) == (turns, ending, None)
    assert rollout.length <= rules.get("max_length", 200) and rollout.reward == 2.0 * len(rollout.policy_turns)


@pytest.mark.parametrize(("room", "replies"), [(3, ("no",)), (1, ())])
def test_a_turn_that_fills_the_context_ends_the_rollout(room: int, replies: tuple[str, ...]) -> None:
    generator = says("1234", end=False)
    rollout = play(Talk(replies=replies), generator, max_length=PROMPT + room, max_turns=3)
    assert rollout.ending == Ending.CONTEXT and rollout.truncated and rollout.length == PROMPT + room
    assert generator.requests[0].sampling.max_new_tokens == room


@pytest.mark.parametrize(
    ("method", "turns", "said"),
    [
        ("prompt", 0, "LookupError: prompt lost its notes"),
        ("enter", 0, "LookupError: enter lost its notes"),
        ("respond", 1, "LookupError: respond lost its notes"),
        ("reward", 1, "RewardError: Talk.turns raised LookupError on task 't': reward lost its notes"),
        ("exit", 1, "LookupError: exit lost its notes"),
    ],
)
def test_whatever_the_environment_raises_is_recorded(method, turns, said):
    environment = Talk(fails=method)
    rollout = play(environment, says("1"))
    assert rollout.ending == Ending.ERROR and rollout.error == said
    assert len(rollout.turns) == turns and rollout.reward == 0 and rollout.rewards == {}
    assert ("exit" in environment.log) == (method != "enter"), "an open session is closed"


def test_a_session_that_swallows_an_exception_is_an_error_too():
    @dataclass(frozen=True, kw_only=True)
    class Quiet(Talk):
        def session(self, task: Task) -> Any:
            @asynccontextmanager
            async def opened() -> AsyncIterator[None]:
                with suppress(LookupError):
                    yield

            return opened()

    rollout = play(Quiet(fails="respond"), says("1"))
    assert rollout.ending == Ending.ERROR and "Quiet.session swallowed an exception" in str(rollout.error)


def test_an_engine_that_raises_is_recorded():
    class Broken(FakeGenerator):
        async def generate(self, *_: Any, **__: Any) -> Completion:
            raise RuntimeError("out of memory")

    rollout = play(Talk(), Broken(TOKENIZER))
    assert rollout.error == "RuntimeError: out of memory" and rollout.ending == Ending.ENGINE


def test_an_engine_that_is_dead_for_good_is_raised_and_not_counted_as_a_wrong_answer():
    class Dead(FakeGenerator):
        async def generate(self, *_: Any, **__: Any) -> Completion:
            raise EngineDied("engine 0 was restarted 3 times")

    with pytest.raises(EngineDied, match="3 times"):
        play(Talk(), Dead(TOKENIZER))


RECORDING = Sampling(max_new_tokens=20, top_k=3, record_sampling_mask=True)


def test_a_turn_carries_what_its_tokens_were_drawn_from():
    class Recording(FakeGenerator):
        async def generate(self, prompt: Any, *, sampling: Sampling, **rest: Any) -> Completion:
            found = await super().generate(prompt, sampling=sampling, **rest)
            return replace(found, columns={KEPT: found.tokens[:, None].int()}) if sampling.records_sampling_mask else found

    scripted = says("12", "3")
    rollout = play(Talk(replies=("no",)), Recording(TOKENIZER, scripted.script), max_turns=2, sampling=RECORDING)
    assert rollout.error is None and len(rollout.policy_turns) == 2
    for turn in rollout.turns:
        assert not turn.columns if not turn.sampled else turn.columns[KEPT].flatten().tolist() == turn.tokens.tolist()


def test_an_engine_that_cannot_record_what_it_kept_is_an_error_with_the_key_to_change():
    rollout = play(Talk(), says("1"), sampling=RECORDING)
    assert rollout.ending == Ending.ERROR
    assert "FakeGenerator does not report the sampling mask" in str(rollout.error)
    assert "policy.generation.keep_sampling_mask" in str(rollout.error)


def test_a_response_that_is_no_list_of_messages_is_recorded():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Talk):
        async def respond(self, task: Task, rollout: Rollout) -> Any:
            return Message("user", "not in a list")

    rollout = play(Wrong(), says("1"), max_turns=2)
    assert rollout.error is not None and rollout.error.startswith("TypeError")


@pytest.mark.parametrize("rules", [{"max_prompt_length": 5}, {"max_length": 10}])
def test_a_prompt_that_is_too_long_is_recorded_with_what_to_change(rules):
    generator = says("1")
    rollout = play(Talk(), generator, **rules)
    length = len(TEMPLATE.encode_prompt((user("guess"),)))
    limit = 5 if "max_prompt_length" in rules else 9
    assert rollout.error is not None
    assert rollout.error.startswith(f"PromptTooLong: the prompt of task 't' has {length} tokens, and at most {limit} fit")
    assert "data.max_input_seq_length" in rollout.error and not generator.requests


def test_rewards_are_scaled_and_the_parts_are_not():
    scaling = RewardScalingConfig(source_min=0.0, source_max=4.0, target_min=-1.0, target_max=1.0)
    rollout = play(Talk(), says("1"), scaling=scaling)
    assert rollout.reward == 0.0 and rollout.rewards == {"turns": 1.0}


@pytest.mark.parametrize(("given", "scaled"), [(-5.0, 10.0), (0.0, 10.0), (1.0, 12.5), (4.0, 20.0), (9.0, 20.0)])
def test_scaling_clips_to_the_source_range(given, scaled):
    assert RewardScalingConfig(source_min=0.0, source_max=4.0, target_min=10.0, target_max=20.0)(given) == scaled


def sample(seed: int, index: int, *, samples: int = 4, latencies: bool = False) -> list[list[int]]:
    generator = FakeGenerator(TOKENIZER, latency=lambda seed: (seed % 7) / 1000 if latencies else 0.0)
    group = play_group(Talk(), generator, index=index, samples=samples, seed=seed)
    assert [rollout.sample for rollout in group.rollouts] == list(range(samples)) and group.index == index
    assert len({rollout.seed for rollout in group.rollouts}) == samples
    return [rollout.tokens().tolist() for rollout in group.rollouts]


@dataclass(frozen=True, kw_only=True)
class Compared(Talk):
    """Adds the rank of a completion by length; ``fails`` may also be the text of the rollout that raises."""

    @reward(weight=10.0)
    async def rank(self, task: Task, rollouts: Sequence[Rollout]) -> list[int]:
        self._visit("rank")
        lengths = sorted(rollout.sampled_tokens for rollout in rollouts)
        return [lengths.index(rollout.sampled_tokens) for rollout in rollouts]

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        if self.fails == "first" and rollout.sample == 0:
            raise LookupError("the first is gone")
        return await super().respond(task, rollout)


def compared(environment: Environment[Any], **options: Any) -> Group:
    """Three samples of 1, 2 and 3 characters, and with ``baseline`` one of 4."""
    texts = iter(["1", "11", "111", "1111"])
    return play_group(environment, FakeGenerator(TOKENIZER, lambda request: (ids(next(texts)), True)), **options)


def test_rewards_of_the_group_come_after_those_of_each_rollout_and_are_added():
    environment = Compared()
    group = compared(environment)
    ranks = [rollout.rewards["rank"] for rollout in group.rollouts]
    assert sorted(ranks) == [0.0, 1.0, 2.0]
    assert [rollout.reward for rollout in group.rollouts] == [2.0 + 10.0 * rank for rank in ranks]
    assert environment.log.count("rank") == 1 and environment.log[-1] == "rank"


def test_rewards_of_the_group_see_the_greedy_baseline_and_are_scaled_once():
    group = compared(Compared(), baseline=True, scaling=RewardScalingConfig(source_max=32.0, target_max=64.0))
    assert group.baseline is not None
    rewards = {rollout.rewards["rank"]: rollout.reward for rollout in (*group.rollouts, group.baseline)}
    assert rewards == {rank: 2 * (2.0 + 10.0 * rank) for rank in (0.0, 1.0, 2.0, 3.0)}


def test_the_baseline_of_a_group_is_greedy():
    generator = FakeGenerator(TOKENIZER, lambda request: ([END], True))
    play_group(Talk(), generator, baseline=True)
    assert [request.sampling.temperature for request in generator.requests] == [1.0, 1.0, 1.0, 0.0]


def test_an_error_in_a_reward_of_the_group_is_recorded_on_all_its_rollouts():
    group = compared(Compared(fails="rank"))
    message = "RewardError: Compared.rank raised LookupError on task 't': rank lost its notes"
    assert list(group.errors) == [message] * 3
    assert all(rollout.reward == 0.0 and rollout.ending == Ending.ERROR and rollout.turns for rollout in group.rollouts)


def test_rewards_of_the_group_leave_out_rollouts_that_failed():
    first, *others = compared(Compared(fails="first")).rollouts
    assert first.error == "LookupError: the first is gone" and not first.rewards
    assert sorted(rollout.rewards["rank"] for rollout in others) == [0.0, 1.0]


def test_randomness_follows_identity_and_not_arrival():
    assert sample(1, 5) == sample(1, 5) == sample(1, 5, latencies=True)
    assert sample(1, 5) == sample(1, 5, samples=6)[:4]
    assert sample(1, 5) != sample(2, 5)
    assert sample(1, 5) != sample(1, 6)
    assert len({tuple(tokens) for tokens in sample(1, 5, samples=12)}) > 6, "samples differ from each other"


def test_a_group_has_the_version_it_was_begun_with():
    generator = FakeGenerator(TOKENIZER, version=3)

    def newer(request: Request) -> tuple[list[int], bool]:
        generator.version = 4  # the weights change while the group runs
        return [END], True

    generator.script = newer
    group = play_group(Talk(), generator, samples=2)
    assert group.version == 3 and {rollout.version for rollout in group.rollouts} == {3}
    assert [rollout.turns[0].versions.tolist() for rollout in group.rollouts] == [[4], [4]]


def test_a_penalised_rollout_has_the_reward_that_zero_is_scaled_to_also_in_a_group_that_is_compared():
    texts = iter(["1", "2", "11"])
    generator = FakeGenerator(TOKENIZER, lambda request: (ids(next(texts)), True))
    penalties = validate_section(
        RewardPenaltiesConfig, {"penalize_unwanted_tokens": True, "token_ids": {"unwanted": [ids("2")[0]]}}
    )
    scaling = RewardScalingConfig(source_max=32.0, target_min=-1.0, target_max=31.0)
    group = play_group(Compared(), generator, scaling=scaling, penalties=penalties)
    penalized = {rollout.text: rollout.metrics["penalty/unwanted_tokens"] for rollout in group.rollouts}
    assert penalized == {"1": 0.0, "2": 1.0, "11": 0.0}
    rewards = {rollout.text: rollout.reward for rollout in group.rollouts}
    assert rewards["2"] == -1.0 and rewards["1"] > -1.0 and rewards["11"] > -1.0


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancel_and_wait() -> None:
    cancel_own_task()
    await asyncio.sleep(5)


async def cancel_all_others() -> None:
    for task in asyncio.all_tasks():
        if task.get_name().startswith("neighbour"):
            task.cancel()
    cancel_own_task()
    await asyncio.sleep(0)


@dataclass(frozen=True, kw_only=True)
class Cancelling(Talk):
    """Cancels the task that it runs in, in the method that is named."""

    where: str = ""
    how: Any = cancel_and_wait

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        if self.where == "respond":
            await self.how()
        return None

    @reward()
    async def odd(self, task: Task, rollout: Rollout) -> float:
        if self.where == "reward" and rollout.sample == 1:
            await self.how()
        if self.where == "reward, at once" and rollout.sample == 1:
            cancel_own_task()
        return 1.0

    @reward(group=True)
    async def group(self, task: Task, rollouts: Sequence[Rollout]) -> list[float]:
        if self.where == "group":
            await self.how()
        return [0.0] * len(rollouts)


@pytest.mark.parametrize("where", ["respond", "reward", "reward, at once", "group"])
@pytest.mark.parametrize("how", [cancel_and_wait, cancel_all_others])
def test_code_that_cancels_its_own_task_fails_its_rollout_and_no_other(where: str, how: Any) -> None:
    """What libraries do whose timeouts go wrong: nothing of the run is cancelled by it."""

    async def work() -> Group:
        group = asyncio.ensure_future(run_talk(Cancelling(where=where, how=how), says("12", "34", "56")))
        return await asyncio.wait_for(group, 20)

    group = asyncio.run(work())
    failed = [rollout.error is not None for rollout in group.rollouts]
    assert failed == ([False, True, False] if where.startswith("reward") else [True] * 3), [each.error for each in group.rollouts]
    assert all("Cancelled" in rollout.error for rollout in group.rollouts if rollout.error)


def test_a_cancellation_from_outside_ends_an_episode_and_what_it_waits_for() -> None:
    async def work() -> list[str]:
        environment = Cancelling(where="respond", how=lambda: asyncio.sleep(30))
        episode = asyncio.ensure_future(
            run_episode(
                LocalEnvironment(environment), TASK, 1, 3, generator=says("12"), template=TEMPLATE, sampling=Sampling(max_new_tokens=20),
                rules=EpisodeRules(max_length=200),
            )
        )  # fmt: skip
        await asyncio.sleep(0.05)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        return environment.log

    assert asyncio.run(work())[-1] == "exit"


def test_a_reward_that_float32_cannot_hold_is_an_error_of_its_rollout() -> None:
    for value, fails in ((1e308, True), (-1e31, True), (1e30, False), (0.0, False)):

        @dataclass(frozen=True, kw_only=True)
        class Large(Talk):
            @reward()
            def turns(self, task: Task, rollout: Rollout) -> float:
                return value  # noqa: B023

        found = play(Large(), says("12"))
        assert (found.error is not None) == fails, (value, found.error)
        assert not fails or "float32; keep rewards below 1e+30" in str(found.error)

"""Episodes: a prompt, then turns by the policy and the environment until one of them ends the rollout."""

from __future__ import annotations

import asyncio
import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch

from strop.endings import Ending, Who, failing_as, find_ending
from strop.environments.forks import run_in_one_process
from strop.environments.handle import EnvironmentHandle
from strop.environments.policy_client import NoPolicyError, serve_policy
from strop.environments.rewards import RewardResult
from strop.generation.base import Generator, InvalidRequest, PastGenerator, PastSelf, PastSelves
from strop.models.chat_template import ChatTemplate
from strop.models.vision.image_files import EncodedPrompt
from strop.monitoring.waits import waiting
from strop.rollouts.policy_turns import ToolTurns, make_policy_turn, make_reply_message
from strop.rollouts.reward_shaping_config import RewardPenaltiesConfig, RewardScalingConfig
from strop.rollouts.stream import EpisodeGate, gather_until_lost, sample_until_counted
from strop.safety.exits import NotAnException, contain_cancellation, contain_exits
from strop.sampling import Sampling, mix_seed
from strop.tools.base import ParsedReply
from strop.tools.toolbox import METRICS
from strop.types import Group, Messages, Rollout, Task, assistant, observation_turn
from strop.user_code import describe_error
from strop.weight_sync.base import EngineDied

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """Limits of an episode, and the processing of its reward."""

    max_turns: int = 1  # turns of the policy
    max_length: int = 4096  # tokens of the whole conversation
    max_prompt_length: int | None = None  # tokens of the first prompt; None: max_length - 1
    scaling: RewardScalingConfig | None = None
    penalties: RewardPenaltiesConfig | None = None
    failed_reward: float | None = 0.0  # of a rollout that the policy made fail; None: the environment scores what there is
    retries: int = 0  # of a rollout that failed by no fault of the policy
    tool_call_format: str | None = None  # None: the format of the chat template


class EpisodeRunner(Protocol):
    """Runs the episodes of environments that name it (``Environment.episode_runner``), such as those that an agent drives."""

    async def __call__(
        self,
        environment: EnvironmentHandle[Any],
        rollout: Rollout,
        generator: Generator,
        template: ChatTemplate,
        sampling: Sampling,
        rules: EpisodeRules,
    ) -> tuple[Rollout, Exception | None]:
        """Return the rollout with what the policy wrote, before its rewards, and how the episode failed, if it did."""
        ...


class EpisodeKeeper(Protocol):
    """Keeps the episodes of a group while they run, so that those of a killed run go on. Set on ``SampledSource.keep`` by a listener."""

    def find_ended(self, rollout: Rollout) -> Rollout | None:
        """Return a rollout that had ended while others of its group had not."""
        ...

    async def restore(self, environment: EnvironmentHandle[Any], rollout: Rollout) -> Rollout | None:
        """Return a rollout as it was kept, once its environment has its state again; None: it begins."""
        ...

    async def keep(self, environment: EnvironmentHandle[Any], rollout: Rollout) -> None:
        """Keep a rollout after a turn if its environment keeps its state, and one that has ended."""
        ...

    def forget(self) -> None:
        """Remove what was kept: the group has ended."""
        ...


class PromptTooLong(ValueError):
    """The prompt of a task is too long. Its group is dropped and counted."""

    ending = Ending.BROKEN_TASK


async def run_group(
    index: int,
    name: str,
    environment: EnvironmentHandle[Any],
    task: Task,
    *,
    samples: int,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
    seed: int,
    greedy_baseline: bool = False,
    past: PastSelves | None = None,
    policies: Mapping[str, Generator] = MappingProxyType({}),
    gates: Sequence[EpisodeGate] = (),
    is_lost: Callable[[Sequence[Rollout]], bool] | None = None,
    kept: EpisodeKeeper | None = None,
) -> Group:
    """Run all rollouts of one task concurrently. An error of the environment or the engine is recorded on its rollout (law 7).

    A rollout that failed by no fault of the policy is sampled again, at most ``rules.retries`` times, with the seed of
    (run seed, task, sample, attempt); the group keeps its slot and its version.

    With ``greedy_baseline``, one more rollout is sampled greedily, as a baseline for the others. The rewards of the group see it too.
    ``past``: earlier selves of the policy; all rollouts of the group play against the same one. ``policies``: further ones, by name.
    ``gates`` decide when its episodes start. Once ``is_lost`` is true of the rollouts that have ended, the others are cancelled.
    """
    version = generator.version
    compares = environment.traits.has_group_rewards

    async def run_sample(sample: int, attempt: int) -> Rollout:
        return await run_in_one_process(
            run_episode,
            environment,
            task,
            sample,
            mix_seed(seed, index, sample, attempt) if attempt else mix_seed(seed, index, sample),
            generator=generator,
            template=template,
            sampling=replace(sampling, temperature=0.0) if sample == samples else sampling,
            rules=replace(rules, scaling=None) if compares else rules,
            version=version,
            kept=kept,
        )

    earlier = None if past is None else past.draw(mix_seed(seed, index))
    opponent = SampledPolicy(generator, template, sampling, rules.max_length, earlier, policies)
    waits = waiting("generation", on=f"group {index}", detail=f"task {task.id} of {name}")
    with waits, serve_policy(opponent):
        sampled = (
            sample_until_counted(name, partial(run_sample, sample), retries=rules.retries, gates=gates)
            for sample in range(samples + greedy_baseline)
        )
        gathered = await gather_until_lost([asyncio.ensure_future(each) for each in sampled], is_lost)
        rollouts = [rollout or _abort(task, sample, version) for sample, rollout in enumerate(gathered)]
        if compares:
            rollouts = await run_in_one_process(_score_each_role, environment, task, rollouts, rules)
    if kept is not None:
        kept.forget()
    rollouts = [_penalize(each, rules, template) for each in rollouts]
    baseline = rollouts[samples] if greedy_baseline else None
    return Group(index=index, environment=name, version=version, rollouts=tuple(rollouts[:samples]), baseline=baseline)


def _abort(task: Task, sample: int, version: int) -> Rollout:
    """Return a rollout that was cancelled."""
    why = "cancelled, because its group could no longer be trained on"
    prompt = torch.zeros(0, dtype=torch.int64)
    return Rollout(
        task=task, sample=sample, seed=0, messages=(), prompt=prompt, version=version, ending=Ending.ABORTED, error=why
    )


async def _score_each_role(
    environment: EnvironmentHandle[Any], task: Task, rollouts: Sequence[Rollout], rules: EpisodeRules
) -> list[Rollout]:
    """Return the rollouts with the group rewards of each role."""
    scored = await _score_group(environment, task, rollouts, rules)
    for number in range(max(len(rollout.others) for rollout in scored)):
        present = [place for place, rollout in enumerate(scored) if rollout.others]
        of_role = await _score_group(environment, task, [scored[place].others[number] for place in present], rules)
        for place, other in zip(present, of_role, strict=True):
            before = scored[place].others
            scored[place] = _with_others(scored[place], (*before[:number], other, *before[number + 1 :]))
    return scored


async def _score_group(
    environment: EnvironmentHandle[Any], task: Task, rollouts: Sequence[Rollout], rules: EpisodeRules
) -> list[Rollout]:
    """Return the rollouts with their group rewards, which compare those that have rewards of their own. An error is recorded on each of
    them.
    """
    valid = [rollout for rollout in rollouts if rollout.error is None or (rules.failed_reward is None and rollout.counts)]
    try:
        where = f"environment {environment.traits.title}, rewards of the group"
        with contain_exits(), waiting(f"group of task {task.id}", on=where, kind="environment"):
            results = await contain_cancellation(environment.score_group(task, valid)) if valid else ()
        scored = [_with_rewards(rollout, result, rules.scaling) for rollout, result in zip(valid, results, strict=True)]
    except Exception as error:
        log.debug("the rewards of the group of task %s failed", task.id, exc_info=error)
        scored = [fail(rollout, error, rules) for rollout in valid]
    if rules.scaling is not None and rules.failed_reward is not None:
        failed = (rollout for rollout in rollouts if rollout.error is not None and rollout.counts)
        scored += [replace(rollout, reward=rules.scaling(rollout.reward)) for rollout in failed]
    by_sample = {rollout.sample: rollout for rollout in scored}
    return [by_sample.get(rollout.sample, rollout) for rollout in rollouts]


def _with_rewards(rollout: Rollout, scored: RewardResult, scaling: RewardScalingConfig | None) -> Rollout:
    reward, steps = scored.reward, scored.step_rewards
    if scaling is not None and not scored.unscored:
        reward, steps = scaling(reward), tuple(replace(step, reward=scaling.slope * step.reward) for step in steps)
    states, unscored = scored.turn_states, scored.unscored
    return replace(
        rollout, reward=reward, rewards=dict(scored.rewards), step_rewards=steps, turn_states=states, unscored=unscored
    )


def _with_others(rollout: Rollout, others: tuple[Rollout, ...]) -> Rollout:
    """Return an episode with the rollouts of its other roles. If one failed or cannot be scored, so has the episode."""
    failed = next((each for each in others if each.error is not None or each.unscored), None)
    if failed is None or rollout.error is not None:
        return replace(rollout, others=others)
    return replace(rollout, others=(), ending=failed.ending, error=failed.error, unscored=rollout.unscored or failed.unscored)


def _penalize(rollout: Rollout, rules: EpisodeRules, template: ChatTemplate) -> Rollout:
    """Return the rollout, and with it those of its other roles, with the rewards that penalties leave."""
    if rules.penalties is None:
        return rollout
    if rollout.error is None and not rollout.unscored:
        least = 0.0 if rules.scaling is None else rules.scaling(0.0)
        rollout = rules.penalties.apply(rollout, template.tokenizer, least)
    return replace(rollout, others=tuple(_penalize(each, rules, template) for each in rollout.others))


def make_failed_group(index: int, version: int, error: Exception) -> Group:
    """Return a group for a task that the environment failed to create: one rollout with that error."""
    log.debug("task %d could not be created", index, exc_info=error)
    rollout = Rollout(
        task=Task(id=f"position {index}"),
        sample=0,
        seed=0,
        messages=(),
        prompt=torch.zeros(0, dtype=torch.int64),
        ending=find_ending(error) or Ending.BROKEN_TASK,
        error=f"the task at position {index} of the stream could not be created: {describe_error(error)}",
    )
    return Group(index=index, environment="", version=version, rollouts=(rollout,))


async def run_episode(
    environment: EnvironmentHandle[Any],
    task: Task,
    sample: int,
    seed: int,
    *,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
    version: int = 0,
    kept: EpisodeKeeper | None = None,
) -> Rollout:
    """Run one rollout and score it. Errors of the environment or the engine are recorded on the rollout, not raised.

    Raises EngineDied if the engine died and has no restarts left.
    """
    empty = torch.zeros(0, dtype=torch.int64)
    rollout = Rollout(task=task, sample=sample, seed=seed, messages=(), prompt=empty, version=version)
    if kept is not None and (ended := kept.find_ended(rollout)) is not None:
        return ended
    try:
        rollout = await contain_cancellation(_run_episode(environment, rollout, generator, template, sampling, rules, kept))
    except NotAnException as error:
        rollout = fail(rollout, error, rules)
    if kept is not None:
        await kept.keep(environment, rollout)
    return rollout


def fail(rollout: Rollout, error: Exception, rules: EpisodeRules) -> Rollout:
    """Return the rollout with the ending that an exception reports, and the reward of a failure if the policy can cause it.

    What the policy did not write cannot be its failure, and is the code's.
    """
    ending = find_ending(error) or Ending.ERROR
    if ending.who == Who.POLICY and not rollout.policy_turns:
        ending = Ending.ERROR
    reward = (rules.failed_reward or 0.0) if ending.who == Who.POLICY else 0.0
    if ending.who == Who.POLICY and rules.scaling is not None:
        reward = rules.scaling(reward)
    return replace(
        rollout, ending=ending, error=describe_error(error), reward=reward, rewards={}, step_rewards=(), turn_states=(), others=()
    )


async def _run_episode(
    environment: EnvironmentHandle[Any],
    rollout: Rollout,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
    kept: EpisodeKeeper | None,
) -> Rollout:
    task, sample = rollout.task, rollout.sample
    scored: RewardResult | None = None
    others: list[tuple[Rollout, RewardResult]] = []
    try:
        with contain_exits():
            async with _WatchedSession(environment, rollout):
                try:
                    tools = None
                    if runner := environment.traits.episode_runner:
                        run: EpisodeRunner = pkgutil.resolve_name(runner)
                        with _wait_for_environment(environment, rollout, "its agent"):
                            rollout, error = await run(environment, rollout, generator, template, sampling, rules)
                        if error is not None:
                            raise error
                    else:
                        rollout, tools = await _begin(environment, rollout, template, rules, kept)
                    while rollout.ending is None:
                        wanted = await _stop_where_asked(rollout, environment, sampling)
                        rollout, reply = await sample_turn(rollout, generator, template, wanted, rules, tools)
                        if tools is not None and reply is not None and reply.asks_for_tools:
                            rollout = await _tool_turn(rollout, environment, tools, reply, rules)
                        else:
                            rollout = await _environment_turn(rollout, environment, template, rules)
                        if kept is not None and rollout.ending is None:
                            await kept.keep(environment, rollout)
                except EngineDied:
                    raise
                except Exception as error:
                    failed = fail(rollout, error, rules)
                    if not failed.counts:
                        raise
                    rollout = failed
                if rollout.error is None or rules.failed_reward is None:
                    with _wait_for_environment(environment, rollout, "rewards"):
                        scored = await environment.score(task, rollout)
                        others = [(other, await environment.score(task, other)) for other in rollout.others]
        if scored is None and rollout.error is None:
            raise RuntimeError(
                f"{environment.traits.title}.session swallowed an exception; let it propagate, so that it is recorded"
            )
    except EngineDied:
        raise  # the engine's restarts are used up. This is no fault of the rollout, which an evaluation would count as wrong
    except Exception as error:
        log.debug("task %s, sample %d failed", task.id, sample, exc_info=error)
        return fail(rollout, error, rules) if rollout.error is None else rollout
    if scored is None:
        return rollout
    earned = tuple(_with_rewards(other, result, rules.scaling) for other, result in others)
    return _with_others(_with_rewards(rollout, scored, rules.scaling), earned)


class _WatchedSession:
    """``environment.open``, with its opening and closing registered as waits with the watchdog."""

    def __init__(self, environment: EnvironmentHandle[Any], rollout: Rollout) -> None:
        self._environment, self._rollout = environment, rollout
        self._session = environment.open(rollout.task)

    async def __aenter__(self) -> Any:
        with _wait_for_environment(self._environment, self._rollout, "opening its session"):
            return await self._session.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        with _wait_for_environment(self._environment, self._rollout, "closing its session"):
            return await self._session.__aexit__(*error)


def _wait_for_environment(environment: EnvironmentHandle[Any], rollout: Rollout, what: str) -> waiting:
    """Register a wait for the environment with the watchdog."""
    return waiting(
        f"sample {rollout.sample}",
        on=f"environment {environment.traits.title}, {what}",
        kind="environment",
        detail=f"task {rollout.task.id}",
    )


async def _begin(
    environment: EnvironmentHandle[Any],
    rollout: Rollout,
    template: ChatTemplate,
    rules: EpisodeRules,
    kept: EpisodeKeeper | None,
) -> tuple[Rollout, ToolTurns | None]:
    """Return the rollout with its prompt, or as it was kept, and the tools of its turns."""
    offer = await environment.offer_tools()
    tools = None if offer is None else ToolTurns.make(offer, template, rules.tool_call_format)
    if kept is not None and (begun := await kept.restore(environment, rollout)) is not None:
        return begun, tools
    rollout.metrics.update(dict.fromkeys(() if tools is None else METRICS, 0.0))
    messages = _check_text(await environment.prompt(rollout.task), environment)
    return start_rollout(rollout, messages, template, rules, tools), tools


def start_rollout(
    rollout: Rollout, messages: Messages, template: ChatTemplate, rules: EpisodeRules, tools: ToolTurns | None
) -> Rollout:
    if tools is not None:
        messages = tools.describe(messages)
    encoded = template.encode_with_images(messages) if tools is None else tools.encode_with_images(messages)
    prompt = encoded.tokens
    limit = rules.max_length - 1 if rules.max_prompt_length is None else min(rules.max_prompt_length, rules.max_length - 1)
    if len(prompt) > limit:
        raise PromptTooLong(
            f"the prompt of task {rollout.task.id!r} has {len(prompt)} tokens, and at most {limit} fit "
            "(data.max_input_seq_length, policy.max_total_sequence_length)"
        )
    return replace(rollout, messages=tuple(messages), prompt=torch.tensor(prompt, dtype=torch.int64), images=encoded.images)


def _check_text(messages: Messages, environment: EnvironmentHandle[Any]) -> Messages:
    """Return the messages. Raises ValueError for one that no tokenizer can read."""
    for message in messages:
        try:
            message.content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{environment.traits.title} gave a message ({message.role}) with a lone surrogate, {error.object[error.start]!r} at "
                f"position {error.start}, which is not text; decode what it reads with errors='replace'"
            ) from None
    return messages


async def _stop_where_asked(rollout: Rollout, environment: EnvironmentHandle[Any], sampling: Sampling) -> Sampling:
    """Return the sampling of the next turn, which also ends at the environment's stop strings."""
    stops = await environment.stop_strings(rollout.task, rollout)
    if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(
            f"{environment.traits.title}.stop_strings returned {stops!r:.80}; return a list of texts that are not empty"
        )
    return replace(sampling, stop_strings=sampling.join_stops(stops)) if stops else sampling


async def sample_turn(
    rollout: Rollout,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
    tools: ToolTurns | None,
) -> tuple[Rollout, ParsedReply | None]:
    """Return the rollout with a policy turn appended, and the parsed turn if there are tools."""
    if tools is not None:
        sampling = tools.stop_at_calls(sampling)
    remaining = rules.max_length - rollout.length
    turn_number = len(rollout.policy_turns)
    shown = {"images": images} if (images := rollout.path_images) else {}
    context = rollout.tokens().tolist()
    waits = waiting(f"sample {rollout.sample}", on=f"engine, turn {turn_number + 1}", kind="generation")
    with waits, failing_as(Ending.ENGINE, unless=(InvalidRequest,)):
        completion = await generator.generate(
            context,
            sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, remaining)),
            seed=mix_seed(rollout.seed, turn_number),
            session=f"{rollout.seed:x}" if rules.max_turns > 1 else "",
            **shown,
        )
    turn = make_policy_turn(completion, context, template, generator, sampling)
    reply = None if tools is None else tools.parse(turn, turn_number)
    rollout = rollout.with_turn(turn, assistant(turn.text) if reply is None else make_reply_message(reply))
    if not completion.stopped:
        rollout = replace(rollout, ending=Ending.CONTEXT if rollout.length >= rules.max_length else Ending.LENGTH)
    return rollout, reply


async def _tool_turn(
    rollout: Rollout, environment: EnvironmentHandle[Any], tools: ToolTurns, reply: ParsedReply, rules: EpisodeRules
) -> Rollout:
    if rollout.ending is not None:  # a call that was cut off is not run
        return rollout
    with _wait_for_environment(environment, rollout, f"tools of turn {len(rollout.policy_turns)}"):
        messages = await environment.answer_calls(rollout, reply)
    if messages is None:
        return replace(rollout, ending=Ending.TOOL_CALLS)
    return append_observation(rollout, messages, tools.encode_results(messages, rollout.turns[-1], reply), rules)


async def _environment_turn(
    rollout: Rollout, environment: EnvironmentHandle[Any], template: ChatTemplate, rules: EpisodeRules
) -> Rollout:
    if rollout.ending is not None:
        return rollout
    with _wait_for_environment(environment, rollout, f"turn {len(rollout.policy_turns)}"):
        messages = await environment.respond(rollout.task, rollout)
    if messages is None:
        return replace(rollout, ending=Ending.STOP)
    sampled = rollout.turns[-1].tokens.tolist()
    encoded = template.encode_observation_with_images(_check_text(messages, environment), sampled)
    return append_observation(rollout, messages, encoded, rules)


def append_observation(rollout: Rollout, messages: Messages, encoded: EncodedPrompt, rules: EpisodeRules) -> Rollout:
    """Return the rollout with an observation appended, or ended if no further policy turn can follow."""
    if len(rollout.policy_turns) >= rules.max_turns:
        return replace(rollout, ending=Ending.TURNS)
    if rollout.length + len(encoded.tokens) >= rules.max_length:
        return replace(rollout, ending=Ending.CONTEXT)
    images = [image.moved(rollout.length) for image in encoded.images]
    text = "\n".join(message.content for message in messages)
    return rollout.with_turn(observation_turn(encoded.tokens, text, images), *messages)


# The policy as its own opponent: the reply it would write in another conversation.


@dataclass(frozen=True)
class SampledPolicy:
    """A ``PolicyClient`` over the generator of a run."""

    generator: Generator | PastGenerator
    template: ChatTemplate
    sampling: Sampling
    max_length: int  # tokens of a conversation
    earlier: PastSelf | None = None  # drawn for the group
    policies: Mapping[str, Generator] = field(default_factory=dict)  # further ones, in the order of their numbers
    number: int = 0  # of the policy among those that the run trains

    @property
    def version(self) -> int:
        return self.generator.version

    def past(self, share: float) -> SampledPolicy:
        if self.earlier is None:
            raise NoPolicyError(
                "this environment plays against earlier selves of the policy, which exist only in training; set opponent to self, or to "
                "endpoint with a model served by strop serve"
            )
        return replace(self, generator=self.earlier.generator) if self.earlier.quantile < share else self

    def named(self, name: str) -> SampledPolicy:
        if name not in self.policies:
            raise NoPolicyError(
                f"a role is played by the policy {name!r}, which exists only in the training that keeps it; bind the role to policy, or to "
                "an endpoint with a model served by strop serve"
            )
        return replace(self, generator=self.policies[name], number=1 + list(self.policies).index(name))

    async def complete(self, messages: Messages, *, seed: int, stop_strings: Sequence[str] = ()) -> str:
        """Return the reply. Raises ValueError for a conversation that leaves no room for one."""
        encoded = self.template.encode_with_images(messages)
        prompt = encoded.tokens
        room = self.max_length - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation of the policy's opponent has {len(prompt)} tokens, and policy.max_total_sequence_length is "
                f"{self.max_length}; raise it"
            )
        stops = self.sampling.join_stops(stop_strings)
        wanted = replace(
            self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room), stop_strings=stops, record_sampling_mask=False
        )
        shown: dict[str, Any] = {"images": encoded.images} if encoded.images else {}
        return (await self.generator.generate(prompt, sampling=wanted, seed=seed, **shown)).text

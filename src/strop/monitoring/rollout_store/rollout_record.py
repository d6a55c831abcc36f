"""One stored rollout: the text the model read and wrote, its rewards, and the log-probabilities of sampler and learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy

from strop.monitoring.rollout_store.learner_inputs import (
    ImagePlace,
    StoredBaseline,
    StoredColumn,
    list_columns,
    list_image_places,
    make_baseline,
)
from strop.monitoring.rollout_store.stored_images import image_name
from strop.monitoring.rollout_store.token_values import TokenValues

if TYPE_CHECKING:
    from torch import Tensor

    from strop.columns import TokenColumn
    from strop.types import Batch, Group, Message, PromptImage, Rollout


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One message after the prompt. Messages from one environment response share a range, and the ranges cover all tokens."""

    role: str  # assistant, or a role of the environment: user, tool, ...
    text: str
    start: int  # tokens[start:end] of the rollout, including the chat template's tokens around an environment's message
    end: int
    sampled: bool  # by the policy
    versions: tuple[int, ...]  # versions of the weights that sampled it, in order, each once; empty for the environment
    reward: float | None = None  # weighted sum of the rewards of its steps; None if it has none
    calls: tuple[str, ...] = ()  # names of the tools called in it by the policy
    tool: str = ""  # the name of the tool that answers
    path: int = 0  # 0: the main path; i: branch i of the rollout
    state: str | None = None  # the environment's state before a policy turn, if reported
    images: tuple[str, ...] = ()  # names of the images shown by the environment, in order
    reasoning: str = ""  # kept separately only for messages that were not sampled; sampled reasoning is part of the text


def make_turn_records(rollout: Rollout) -> tuple[TurnRecord, ...]:
    """Return the messages of a rollout after its prompt: those of the main path, then those of each branch."""
    records: list[TurnRecord] = []
    start, next_message, first = 0, len(rollout.prompt_messages), 0
    states = iter(rollout.turn_states)
    paths = (rollout.turns, *(branch.turns for branch in rollout.branches))
    for path, turn in ((path, turn) for path, turns in enumerate(paths) for turn in turns):
        messages = rollout.messages[next_message : next_message + turn.num_messages]
        named = [
            (
                message.role,
                turn.text if turn.sampled else message.shown_content,
                tuple(call.name for call in message.tool_calls),
                message.name,
                "" if turn.sampled else message.reasoning,
            )
            for message in messages
        ]
        versions = tuple(dict.fromkeys(turn.versions.unique_consecutive().tolist())) if turn.sampled else ()
        end = start + len(turn.tokens)
        reward = _sum_steps(rollout, first, first + len(turn.tokens)) if turn.sampled else None
        common: dict[str, Any] = {
            "start": start,
            "end": end,
            "sampled": turn.sampled,
            "versions": versions,
            "reward": reward,
            "path": path,
            "state": next(states, None) if turn.sampled else None,
        }
        shown = tuple(image_name(image.digest) for image in turn.images)
        default = [("assistant" if turn.sampled else "user", turn.text, (), "", "")]
        records += [
            TurnRecord(
                role=role, text=text, calls=calls, tool=tool, images=() if number else shown, reasoning=reasoning, **common
            )
            for number, (role, text, calls, tool, reasoning) in enumerate(named or default)
        ]
        first += len(turn.tokens) if turn.sampled else 0
        start, next_message = end, next_message + turn.num_messages
    return tuple(records)


def _sum_steps(rollout: Rollout, start: int, end: int) -> float | None:
    """Sum the rewards of the steps that end at sampled tokens [start, end)."""
    rewards = [step.reward for step in rollout.step_rewards if start <= step.token < end]
    return float(sum(rewards)) if rewards else None


DropReason = Literal["filtered", "error", "stale", "unscored", "too_few", "failed"]
LEFT_OUT = ("unscored", "failed")  # reasons of single rollouts of a group that is trained on
RolloutKey = tuple[int, int]  # (group index, sample): identifies a rollout in a run


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout. Per-token columns cover the conversation after the prompt, including the environment's turns; then each branch.
    They are tuples, and arrays (``TokenValues``) in a record that was made and not read.
    """

    step: int
    group: int
    environment: str
    task_id: str
    sample: int
    prompt: str
    completion: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    sampled: Sequence[bool]  # True: by the policy; False: from the environment
    sampler_logprobs: Sequence[float]  # 0 for tokens of the environment
    learner_logprobs: Sequence[float] | None  # likewise; None if the learner did not score the rollout
    versions: Sequence[int]  # weights version that sampled the token; -1 for tokens of the environment
    advantage: float | None  # None for a dropped group
    reward: float
    rewards: Mapping[str, float]
    ending: str
    error: str | None
    kept: bool
    dropped_because: DropReason | None
    answer: str = ""  # the task's reference answer
    prompt_messages: tuple[Mapping[str, str], ...] = ()  # role, content, and reasoning if it has some, before the first turn
    turns: tuple[TurnRecord, ...] = ()  # messages after the prompt; empty in files of earlier versions
    branches: tuple[tuple[int, int], ...] = ()  # per branch: the path it leaves, and how many of its tokens it continues
    metrics: Mapping[str, float] = field(default_factory=dict)  # the environment's own
    output: str = ""  # what an agent printed or returned
    prompt_images: tuple[tuple[int, str], ...] = ()  # per image of the prompt: its message and its name

    # Per-token results of the update (``strop.ledger``), aligned with ``tokens``; 0 or False for tokens of the environment. None
    # if the run stored none (logger.token_columns), for dropped groups, and for columns that the algorithm lacks.
    trained_logprobs: tuple[float, ...] | None = (
        None  # at its last training; None after one optimizer step: same as learner_logprobs
    )
    entropy: tuple[float, ...] | None = None  # nats, of the policy's distribution at that time
    reference_logprobs: tuple[float, ...] | None = None
    token_advantages: tuple[float, ...] | None = None
    correction: tuple[float, ...] | None = None  # the weight of the corrections
    mask: tuple[bool, ...] | None = None  # whether it counts in the loss
    clipped: tuple[bool, ...] | None = None  # whether a clip or bound of the objective affected it
    mask_reason: tuple[str, ...] | None = None  # why it has no gradient (``token_columns.REASONS``); empty if it has one
    loss_terms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # each loss term at each token
    loss_gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # derivative with respect to the token's logit
    # Further inputs for replaying a step (``strop replay``); None in files of earlier versions.
    role: str = ""  # of the environment's roles, that wrote it
    group_version: int | None = None  # weights version when the group was started
    step_rewards: tuple[tuple[int, float], ...] | None = None  # per step: its last token among the sampled ones, and its reward
    turn_advantages: tuple[float, ...] | None = None  # per policy turn, a value that replaces its advantage; empty: none
    baseline: StoredBaseline | None = None  # the greedy rollout of its group, if there is one
    image_places: tuple[ImagePlace, ...] | None = None
    columns: Mapping[str, StoredColumn] = field(default_factory=dict)  # each a column of the file


def make_records(
    step: int,
    groups: Sequence[Group],
    *,
    advantages: Mapping[RolloutKey, float] | None = None,
    learner_logprobs: Mapping[RolloutKey, Tensor] | None = None,
    dropped: Mapping[int, DropReason] | None = None,
    decode: Callable[[list[int]], str] | None = None,
    stores: Callable[[TokenColumn], bool] = lambda column: column.stored is True,
) -> list[RolloutRecord]:
    """Build the records of a step's groups, including dropped ones. Rollouts left out of a group come last, so that trained
    rollouts come first, in packing order.

    ``advantages`` and ``learner_logprobs`` are keyed by (group.index, rollout.sample) and omit dropped rollouts. The
    log-probabilities cover the rollout's sampled tokens, or all its tokens after the prompt. ``dropped`` maps group.index to
    the reason of a whole group. ``decode`` is the tokenizer's, for the prompt exactly as the model reads it;
    without it the messages are stored. ``stores``: which columns are stored of rollouts that are trained on.
    """
    advantages, learner_logprobs, dropped = advantages or {}, learner_logprobs or {}, dropped or {}
    placed = [(group, rollout) for group in groups for rollout in group.rollouts]
    columns = _list_recorded([rollout for _, rollout in placed], stores)
    placed += [(group, rollout) for group in groups for rollout in group.left_out]
    prompts = {group.index: _Prompts(decode) for group in groups}
    return [
        _make_record(
            step,
            group,
            rollout,
            advantage=advantages.get((group.index, rollout.sample)),
            learner=learner_logprobs.get((group.index, rollout.sample)),
            dropped=dropped.get(group.index, "unscored" if rollout.unscored else None if rollout.counts else "failed"),
            prompts=prompts[group.index],
            columns=columns,
        )
        for group, rollout in placed
    ]


def _list_recorded(rollouts: Sequence[Rollout], stores: Callable[[TokenColumn], bool]) -> list[TokenColumn]:
    """Return the columns of rollouts and their turns that are stored."""
    held = [columns for each in rollouts for columns in (each.columns, *(turn.columns for turn in each.policy_turns))]
    found = list(filter(stores, dict.fromkeys(column for columns in held for column in columns)))
    if taken := {column.name for column in found} & {each.name for each in fields(RolloutRecord)}:
        raise ValueError(f"stored rollouts already have a field {min(taken)!r}; give the column another name")
    return found


def list_images(groups: Sequence[Group]) -> Iterator[PromptImage]:
    """Yield the images in prompts and observations of groups, once per occurrence."""
    for group in groups:
        for rollout in group.every_rollout:
            yield from rollout.path_images
            yield from (image for branch in rollout.branches for turn in branch.turns for image in turn.images)


def split_by_rollout(column: Tensor, batch: Batch, groups: Sequence[Group]) -> dict[RolloutKey, Tensor]:
    """Split a column of ``batch`` ([N], over predicted tokens) by rollout. ``groups`` are those it was packed from, in order."""
    keys = [(group.index, rollout.sample) for group in groups for rollout in group.rollouts]
    if len(keys) != batch.num_sequences:
        raise ValueError(
            f"the batch has {batch.num_sequences} rollouts and the groups {len(keys)}: pass the groups that it was packed from"
        )
    return dict(zip(keys, batch.split(column.detach().cpu()), strict=True))


class _Prompts:
    """The prompt of a group as text and tokens, made once for rollouts that have the same one."""

    def __init__(self, decode: Callable[[list[int]], str] | None) -> None:
        self.decode = decode
        self._last: tuple[Tensor, tuple[str, TokenValues]] | None = None

    def of(self, rollout: Rollout) -> tuple[str, TokenValues]:
        tokens = rollout.prompt.numpy()
        if self.decode is None:
            return _format_prompt(rollout), TokenValues(tokens)
        if self._last is None or not self._last[0].equal(rollout.prompt):
            self._last = rollout.prompt, (self.decode(tokens.tolist()), TokenValues(tokens))
        return self._last[1]


def _make_record(
    step: int,
    group: Group,
    rollout: Rollout,
    *,
    advantage: float | None,
    learner: Tensor | None,
    dropped: DropReason | None,
    prompts: _Prompts,
    columns: Sequence[TokenColumn],
) -> RolloutRecord:
    turns = (*rollout.turns, *(turn for branch in rollout.branches for turn in branch.turns))
    sampled = numpy.repeat([turn.sampled for turn in turns], [len(turn.tokens) for turn in turns]).astype(bool)
    prompt, prompt_tokens = prompts.of(rollout)
    return RolloutRecord(
        step=step,
        group=group.index,
        environment=group.environment,
        task_id=rollout.task.id,
        sample=rollout.sample,
        prompt=prompt,
        completion="".join(turn.text for turn in rollout.turns),
        prompt_tokens=prompt_tokens,
        tokens=TokenValues.join((turn.tokens for turn in turns), numpy.int64),
        sampled=TokenValues(sampled),
        sampler_logprobs=TokenValues.join((turn.logprobs for turn in turns), numpy.float32),
        learner_logprobs=None if learner is None else _expand_to_all_tokens(learner, sampled),
        versions=TokenValues.join((turn.versions for turn in turns), numpy.int32),
        advantage=None if advantage is None else float(advantage),
        reward=float(rollout.reward),
        rewards={name: float(value) for name, value in rollout.rewards.items()},
        ending="" if rollout.ending is None else rollout.ending.value,
        error=rollout.error,
        kept=dropped is None,
        dropped_because=dropped,
        answer=rollout.task.answer,
        prompt_messages=tuple(map(_store_message, _prompt_messages(rollout))),
        turns=make_turn_records(rollout),
        branches=tuple((branch.parent, branch.start) for branch in rollout.branches),
        metrics=storable_metrics(rollout),
        output=rollout.output,
        prompt_images=list_prompt_images(rollout),
        role=rollout.role,
        group_version=group.version,
        step_rewards=tuple((step.token, step.reward) for step in rollout.step_rewards),
        turn_advantages=tuple(rollout.turn_advantages),
        baseline=make_baseline(group),
        image_places=list_image_places(rollout),
        columns=list_columns(rollout, columns) if dropped is None else {},
    )


def list_prompt_images(rollout: Rollout) -> tuple[tuple[int, str], ...]:
    """Return (message, name) for each image of the prompt, in message order."""
    places = [number for number, message in enumerate(_prompt_messages(rollout)) for _ in message.images]
    return tuple((place, image_name(image.digest)) for place, image in zip(places, rollout.images, strict=False))


def storable_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the finite metrics of a rollout; those of a failed rollout were not checked."""
    numbers = {name: value for name, value in rollout.metrics.items() if isinstance(value, int | float)}
    return {str(name): float(value) for name, value in numbers.items() if str(name).isprintable() and -(2**63) < value < 2**63}


def _expand_to_all_tokens(logprobs: Tensor, sampled: Any) -> TokenValues:
    values = (logprobs if logprobs.itemsize > 2 else logprobs.float()).numpy()
    if len(values) == len(sampled):
        return TokenValues(values)
    if len(values) != sampled.sum():
        raise ValueError(
            f"{len(values)} learner log-probs for a rollout of {len(sampled)} tokens, {sampled.sum()} of them sampled: "
            "give one for each sampled token, or one for each token"
        )
    expanded = numpy.zeros(len(sampled), dtype=values.dtype)
    expanded[sampled] = values
    return TokenValues(expanded)


def _store_message(message: Message) -> dict[str, str]:
    stored = {"role": message.role, "content": message.shown_content}
    return {**stored, "reasoning": message.reasoning} if message.reasoning else stored


def _format_prompt(rollout: Rollout) -> str:
    return "\n".join(f"{message.role}: {message.shown_content}" for message in _prompt_messages(rollout))


def _prompt_messages(rollout: Rollout) -> tuple[Message, ...]:
    """Return the messages before the first turn. Hand-made turns do not record their number of messages."""
    if not rollout.turns or any(turn.num_messages for turn in rollout.turns):
        return rollout.prompt_messages
    replies = [index for index, message in enumerate(rollout.messages) if message.role == "assistant"]
    num_turns = len(rollout.policy_turns)
    return rollout.messages[: replies[-num_turns]] if 0 < num_turns <= len(replies) else rollout.messages


def replace_surrogates(record: RolloutRecord) -> RolloutRecord:
    """Return the record with lone surrogates, which no file can hold, replaced by the replacement character."""
    return replace(
        record,
        environment=encodable(record.environment),
        task_id=encodable(record.task_id),
        prompt=encodable(record.prompt),
        completion=encodable(record.completion),
        error=None if record.error is None else encodable(record.error),
        answer=encodable(record.answer),
        output=encodable(record.output),
        prompt_messages=tuple({name: encodable(text) for name, text in each.items()} for each in record.prompt_messages),
        turns=tuple(
            replace(
                turn,
                role=encodable(turn.role),
                text=encodable(turn.text),
                state=None if turn.state is None else encodable(turn.state),
                calls=tuple(map(encodable, turn.calls)),
                tool=encodable(turn.tool),
                reasoning=encodable(turn.reasoning),
            )
            for turn in record.turns
        ),
    )


def encodable(text: str) -> str:
    """Return the text with lone surrogates replaced by the replacement character."""
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")

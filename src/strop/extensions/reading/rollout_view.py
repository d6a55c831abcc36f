"""Stored rollouts as text for a terminal: which to show, and their messages with facts above them. All text is safe to display."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from strop.monitoring.rollout_store.rollout_flags import FlaggedRollouts
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
from strop.monitoring.rollout_store.stored_files import DamagedRollouts
from strop.safety.printable import make_printable, shorten
from strop.user_code import suggest_names

if TYPE_CHECKING:
    from rich.table import Table


LONGEST_STATE = 60  # characters
_ENDINGS = {
    "stop": "stop: the model stopped, and the environment had nothing to add",
    "length": "length: a turn reached the maximum number of new tokens",
    "context": "context: the conversation no longer fits",
    "turns": "turns: the maximum number of turns was reached",
    "tool_calls": "tool_calls: the maximum number of tool calls was reached",
    "error": "error",
}


@dataclass(frozen=True)
class ShownMessage:
    role: str
    text: str
    sampled: bool
    note: str = ""  # its tokens, the weights that sampled it, the reward of its steps, and its state
    reasoning: str = ""  # from the message's separate field
    origin: str = ""  # where that comes from


@dataclass(frozen=True)
class ShownRollout:
    title: str
    facts: tuple[tuple[str, str], ...]  # facts about the rollout: name and value
    messages: tuple[ShownMessage, ...]


def show_rollout(record: RolloutRecord, limit: int | None, flags: Sequence[str] = ()) -> ShownRollout:
    """Prepare a rollout for display. ``flags`` are the reward hacking detectors that flagged it.

    A message longer than ``limit`` characters is shortened in the middle.
    """
    title = f"step {record.step}, task {record.task_id}, sample {record.sample}, {record.environment}"
    messages = tuple(
        replace(
            message,
            role=make_printable(message.role),
            text=make_printable(_shorten(message.text, limit)),
            reasoning=make_printable(_shorten(message.reasoning, limit)),
        )
        for message in _list_messages(record)
    )
    facts = tuple((make_printable(name), make_printable(_shorten(value, limit))) for name, value in _list_facts(record, flags))
    return ShownRollout(make_printable(title).replace("\n", " "), facts, messages)


def _list_messages(record: RolloutRecord) -> list[ShownMessage]:
    prompt = [
        ShownMessage(
            message["role"],
            message["content"],
            sampled=False,
            reasoning=message.get("reasoning") or "",
            origin=describe_origin(message.get("reasoning") or "", record.prompt),
        )
        for message in record.prompt_messages
    ]
    turns = [
        ShownMessage(
            turn.role,
            turn.text,
            turn.sampled,
            _describe_turn(turn) + _describe_state(turn.state) + branch,
            turn.reasoning,
            describe_origin(turn.reasoning),
        )
        for turn, branch in zip(record.turns, _describe_branches(record), strict=True)
    ]
    if turns or record.prompt_messages:
        return [*prompt, *turns]
    return [  # in files of earlier versions
        ShownMessage("prompt", record.prompt, sampled=False),
        ShownMessage("completion", record.completion, sampled=True, note=_describe_tokens(sum(record.sampled), ())),
    ]


def describe_origin(reasoning: str, prompt: str = "") -> str:
    """Describe the origin of reasoning kept outside of a message's text; "" without any. ``prompt``: as read by the policy.

    Chat templates drop or write the reasoning of earlier messages; what is in the prompt was read."""
    if not reasoning:
        return ""
    origin = "given in its own field"
    if not prompt:
        return origin
    return (
        f"{origin}, and in the prompt"
        if reasoning.strip() in prompt
        else f"{origin}, and not in the prompt: the policy did not read it"
    )


def _describe_branches(record: RolloutRecord) -> Iterator[str]:
    """Yield, per turn, the start of its branch if it is the first sampled turn of a branch."""
    shown = 0
    for turn in record.turns:
        if turn.path > shown and turn.sampled:  # the turns before it have no note
            shown = turn.path
            parent, start = record.branches[shown - 1]
            where = f"branch {parent}" if parent else "the conversation"
            yield f"; branch {shown} begins after {start} tokens of {where}" if start else f"; branch {shown} starts again"
        else:
            yield ""


def _describe_turn(turn: TurnRecord) -> str:
    tools = f", calls {', '.join(turn.calls)}" if turn.calls else f", tool {turn.tool}" if turn.tool else ""
    return _describe_tokens(turn.end - turn.start, turn.versions, turn.reward) + tools


def _describe_tokens(tokens: int, versions: tuple[int, ...], reward: float | None = None) -> str:
    weights = f", weights of step {'-'.join(map(str, dict.fromkeys((versions[0], versions[-1]))))}" if versions else ""
    return f"{tokens} tokens{weights}" + ("" if reward is None else f", reward {_number(reward)}")


def _describe_state(state: str | None) -> str:
    return "" if state is None else f", in state {shorten(' '.join(make_printable(state).split()), LONGEST_STATE)}"


def _list_facts(record: RolloutRecord, flags: Sequence[str]) -> list[tuple[str, str]]:
    facts = [("flagged", f"{', '.join(flags)} (perhaps the reward is hacked)")] if flags else []
    facts.append(("reward", _number(record.reward)))
    if record.rewards:
        facts.append(("rewards", _numbers(record.rewards)))
    if record.metrics:
        facts.append(("metrics", _numbers(record.metrics)))
    if record.advantage is not None:
        facts.append(("advantage", f"{record.advantage:+.4g}"))
    if calls := Counter(name for turn in record.turns for name in turn.calls):
        facts.append(("tools", ", ".join(f"{name} {count}" for name, count in calls.most_common())))
    facts.append(("ended by", _ENDINGS.get(record.ending, record.ending) or "nothing"))
    if record.error is not None:
        facts.append(("error", record.error))
    if not record.kept:
        facts.append(("dropped", f"not trained on: {record.dropped_because}"))
    if record.answer:
        facts.append(("answer", record.answer))
    if record.output:
        facts.append(("output", record.output))
    return facts


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _number(value: float) -> str:
    return f"{value:.4g}"


def _shorten(text: str, limit: int | None) -> str:
    return text if limit is None else shorten(text, limit, around="\n")


NARROW = 50  # columns; below this, a role gets a separate line
WIDEST_ROLE = 12
LONGEST_REASONING = 200  # characters of reasoning kept outside of a message
STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def format_rollout(shown: ShownRollout, *, width: int, colour: bool, unfold: bool = False) -> str:
    """Return a rollout as lines of at most ``width`` columns; ``unfold`` shows all reasoning.

    The policy's text is marked by a bar, anything else by dots."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 20), force_terminal=colour, color_system="standard" if colour else None, legacy_windows=False
    )
    console.print(Rule(Text(shown.title, style="bold"), align="left", characters="-"))
    for name, value in shown.facts:
        line = Text(f"{name}: ", style="bold red" if name == "error" else "bold")
        console.print(line.append(Text(value, style="not bold")))
    console.print()
    role_width = 0 if width < NARROW else min(max((len(message.role) for message in shown.messages), default=0), WIDEST_ROLE)
    for message in shown.messages:
        if not role_width:
            console.print(Text(message.role, style=_style(message)))
        console.print(_make_table(message, role_width, LONGEST_REASONING if not unfold else None))
        if message.note and message.sampled:
            console.print(Text(f"({message.note})", style="dim"), justify="right")
    return "\n".join(line.rstrip(" ") for line in out.getvalue().split("\n"))


def _make_table(message: ShownMessage, role_width: int, most: int | None) -> Table:
    """Return a message as columns: its role, if it has a width, the bar, and its text."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    if role_width:
        table.add_column(width=role_width, justify="right", overflow="fold")
    table.add_column(width=1)
    table.add_column(overflow="fold")
    lines = [*_fold_reasoning(message, most), *message.text.expandtabs(4).split("\n")]
    for number, line in enumerate(lines):
        role = [Text("" if number else message.role, style=_style(message))] if role_width else []
        table.add_row(*role, Text("|" if message.sampled else ":", style=_style(message)), Text(line))
    return table


def _fold_reasoning(message: ShownMessage, most: int | None) -> list[str]:
    """Return the reasoning of a message on one line, at most ``most`` characters of it; nothing without any."""
    if not message.reasoning:
        return []
    text = " ".join(message.reasoning.split())
    beginning = text if most is None or len(text) <= most else f"{text[:most]}..."
    return [f"[reasoning, {message.origin}: {beginning}]"]


def _style(message: ShownMessage) -> str:
    return f"bold {STYLES.get(message.role, 'blue')}"


class RolloutSource(Protocol):
    """Stored rollouts by step: those of training, or those of validations."""

    def steps(self) -> list[int]: ...

    def read(self, step: int, task_id: str | None = None) -> list[RolloutRecord]: ...

    def read_flags(self, step: int) -> FlaggedRollouts: ...


class NoRollouts(ValueError):
    """Nothing was selected. The message lists what is available."""


@dataclass(frozen=True, kw_only=True)
class RolloutSelection:
    """What to show. A task without a step is shown over all steps, one sample each; otherwise the newest step is used."""

    step: int | None = None
    task: str | None = None
    environment: str | None = None
    ending: str | None = None
    best: int | None = None  # this many with the highest reward
    worst: int | None = None  # this many with the lowest, after the best
    flagged: bool = False  # those flagged by the reward hacking monitor
    limit: int = 4  # rollouts, if neither best nor worst is given

    @property
    def ranked(self) -> bool:
        return self.best is not None or self.worst is not None

    @property
    def over_steps(self) -> bool:
        return self.task is not None and self.step is None

    def list_steps(self, stored: Sequence[int]) -> list[int]:
        """Return the steps to read, in order. Unless ``over_steps``, only the first readable one is used."""
        if self.step is not None:
            return [self.step]
        return list(stored) if self.over_steps else list(reversed(stored))


@dataclass(frozen=True)
class SelectedRollouts:
    """The rollouts to show, and the number of matching ones."""

    records: tuple[RolloutRecord, ...]
    matching: int
    summary: str  # of the steps read
    flags: Mapping[int, FlaggedRollouts] = field(default_factory=dict)  # by step
    damaged: tuple[str, ...] = ()  # messages about unreadable files that were skipped

    def flags_of(self, record: RolloutRecord) -> tuple[str, ...]:
        return self.flags.get(record.step, {}).get((record.task_id, record.sample), ())


def select_rollouts(source: RolloutSource, selection: RolloutSelection) -> SelectedRollouts:
    """Read the rollouts of a selection, one step at a time.

    Unreadable files are skipped and reported. Raises NoRollouts, and DamagedRollouts if no requested step can be read."""
    steps = source.steps()
    if not steps:
        raise NoRollouts("no rollouts are stored")
    reader = _Reader(source)
    flags = {step: flagged for step in steps if (flagged := reader.read_flags(step))}
    if selection.flagged:
        steps = [step for step in steps if step in flags]
        if not steps:
            raise NoRollouts("the monitor of reward hacking has flagged no rollout; a detector names some from its alarm on")
    if selection.step is not None and selection.step not in steps:
        raise NoRollouts(f"there are no rollouts of step {selection.step}; stored are {_describe_steps(steps)}")
    seen = _Seen()
    matching: list[RolloutRecord] = []
    for records in reader.read(selection, steps):
        found = [record for record in seen.watch(records) if _matches(record, selection, flags)]
        seen.matching += len(found)
        matching += found[:1] if selection.over_steps and not selection.ranked else found
    if not matching:
        list(seen.watch(reader.read_any(selection.step, steps)))  # the existing names
        raise NoRollouts(f"no rollout of {_describe_range(reader.steps)} {_explain(selection, seen)}")
    return SelectedRollouts(tuple(_pick(matching, selection)), seen.matching, seen.describe(), flags, tuple(reader.damaged))


class _Reader:
    """Reads the steps of a selection, and skips unreadable files."""

    def __init__(self, source: RolloutSource) -> None:
        self._source = source
        self.steps: list[int] = []  # those that were read
        self.damaged: list[str] = []

    def read_flags(self, step: int) -> FlaggedRollouts:
        try:
            return self._source.read_flags(step)
        except DamagedRollouts as error:
            self.damaged.append(str(error))
            return {}

    def read(self, selection: RolloutSelection, stored: Sequence[int]) -> Iterator[list[RolloutRecord]]:
        """Yield the rollouts of each step. Raises DamagedRollouts if the only step cannot be read, or none can."""
        first: DamagedRollouts | None = None
        for step in selection.list_steps(stored):
            try:
                records = self._source.read(step, selection.task if selection.over_steps else None)  # a single task is read alone
            except DamagedRollouts as error:
                if selection.step is not None:
                    raise
                first = first or error
                self.damaged.append(str(error))
                continue
            self.steps.append(step)
            yield records
            if not selection.over_steps:
                return
        if first is not None and not self.steps:
            raise first

    def read_any(self, step: int | None, stored: Sequence[int]) -> list[RolloutRecord]:
        return next(self.read(RolloutSelection(step=step), stored))


class _Seen:
    """What was read, for the summary and for suggestions."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.tasks: Counter[str] = Counter()
        self.environments: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.not_trained_on = 0
        self.matching = 0

    def watch(self, records: Sequence[RolloutRecord]) -> Iterator[RolloutRecord]:
        for record in records:
            self.steps.add(record.step)
            self.tasks[record.task_id] += 1
            self.environments[record.environment] += 1
            self.endings[record.ending] += 1
            self.not_trained_on += not record.kept
            if record.error is None:
                self.rewards.append(record.reward)
            yield record

    def describe(self) -> str:
        tasks = f"{len(self.tasks)} task{'s' if len(self.tasks) != 1 else ''}"
        parts = [f"{_describe_range(sorted(self.steps))}: {sum(self.tasks.values())} rollouts of {tasks}"]
        if self.rewards:
            mean = sum(self.rewards) / len(self.rewards)
            parts.append(f"reward {mean:.4g} ({min(self.rewards):.4g} to {max(self.rewards):.4g})")
        parts.append("ended by " + ", ".join(f"{name or 'nothing'} {count}" for name, count in self.endings.most_common()))
        if self.not_trained_on:
            parts.append(f"{self.not_trained_on} not trained on")
        return "; ".join(parts)


def _matches(record: RolloutRecord, selection: RolloutSelection, flags: Mapping[int, FlaggedRollouts]) -> bool:
    return (
        selection.task in (None, record.task_id)
        and selection.environment in (None, record.environment)
        and selection.ending in (None, record.ending)
        and (not selection.flagged or (record.task_id, record.sample) in flags[record.step])
    )


def _pick(records: list[RolloutRecord], selection: RolloutSelection) -> Iterator[RolloutRecord]:
    if not selection.ranked:
        yield from islice(records, selection.limit)
        return
    scored = [record for record in records if record.error is None]
    ranked = sorted(scored, key=lambda record: -record.reward)  # stable: equal rewards stay in order
    best = ranked[: selection.best or 0]
    yield from best
    worst = sorted(scored, key=lambda record: record.reward)[: selection.worst or 0]
    yield from (record for record in worst if not any(record is other for other in best))


def _explain(selection: RolloutSelection, seen: _Seen) -> str:
    if not seen.tasks:
        return "is stored: the step has none"
    for wanted, what, known in (
        (selection.environment, "is of the environment", seen.environments),
        (selection.ending, "ended by", seen.endings),
        (selection.task, "is of the task", seen.tasks),
    ):
        if wanted is not None and wanted not in known:
            names = [name for name, _ in known.most_common(20)]
            more = f" and {len(known) - len(names)} more" if len(known) > len(names) else ""
            return f"{what} {wanted!r}{suggest_names(wanted, names)}{more}"
    return "meets all conditions; leave one of the options out"


def _describe_steps(steps: Sequence[int]) -> str:
    if len(steps) <= 8:
        return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def _describe_range(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"

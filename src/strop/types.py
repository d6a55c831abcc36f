"""The data that flows through Strop: Task -> Rollout -> Group -> RolloutCredit -> Batch.

Everything here is a frozen dataclass over torch tensors. This module depends on no models, engines, environments or algorithms, so every
other module may import it.

Shapes are written with these letters throughout the code base:

    T  tokens that the network reads (a flat row, no padding)
    N  predicted tokens: sampled by the policy or, in supervised training, the loss tokens
    S  rollouts (sequences)
    L  paths of rollouts: as many as rollouts, unless one has branches; also the tokens of one turn
    G  rollouts of one group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile, zip_longest
from typing import Any, Literal

from strop.columns import Columns, TokenColumn
from strop.endings import Ending, Who
from strop.lazy_torch import Tensor, torch
from strop.thoughts import read_answer

# The number of the policy that a rollout trains; 0 is the run's own.
TRAINED_POLICY = TokenColumn(name="trained_policy", dtype="int32", aligned="rollout")


@dataclass(frozen=True)
class ToolCall:
    """A tool call requested by an assistant message."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def as_dict(self) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True)
class Image:
    """An image in a message, by reference."""

    source: str  # a path, an address, or a data: URL
    position: int = 0  # number of characters of the content before it


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptImage:
    """An image in a row of tokens: its position, and the file itself.

    It is kept as an encoded file (PNG, JPEG); the learner and the engine decode it when they need the pixels. In a rollout
    ``start`` counts from the beginning of its path (the prompt's first token is 0), in a batch it is an index into T.
    """

    start: int  # index of its first placeholder token
    length: int  # tokens from its first to its last placeholder; some model families insert others between them (rows of tiles)
    content: bytes = field(repr=False)
    digest: str  # SHA-256 of the content, in hex: equal digests are equal images

    @property
    def end(self) -> int:
        return self.start + self.length

    def moved(self, distance: int) -> PromptImage:
        return replace(self, start=self.start + distance)


@dataclass(frozen=True)
class Message:
    """One message of a conversation, in the form that chat templates take."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    reasoning: str = ""  # of an assistant, if kept separate from the content
    name: str = ""  # of the tool that answers, or of the speaker
    tool_call_id: str = ""  # of the call that a tool answers
    images: tuple[Image, ...] = ()  # by position
    in_loss: bool = True  # of a recorded assistant: false means context only, not trained on

    def as_parts(self) -> list[dict[str, str]]:
        """Return the content as a list of texts and images, as the chat templates of vision models expect it."""
        cuts = [0, *(image.position for image in self.images), len(self.content)]
        texts = [{"type": "text", "text": self.content[start:end]} for start, end in pairwise(cuts)]
        images = [{"type": "image", "image": image.source} for image in self.images]
        parts = [part for pair in zip_longest(texts, images) for part in pair if part is not None]
        return [part for part in parts if part.get("text") != ""] or texts[:1]

    @property
    def shown_content(self) -> str:
        """The content with image names in place of the images, for display."""
        return "".join(
            part["text"] if part["type"] == "text" else f"[image: {_name_image(part['image'])}]" for part in self.as_parts()
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the form chat templates expect; fields that are not set are left out."""
        optional = {
            "tool_calls": [call.as_dict() for call in self.tool_calls],
            "reasoning_content": self.reasoning,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        content = self.as_parts() if self.images else self.content
        return {"role": self.role, "content": content, **{key: value for key, value in optional.items() if value}}


def _name_image(source: str) -> str:
    """Return an image reference for display: a long ``data:`` URL loses its content."""
    return source.partition(",")[0] if source.startswith("data:") and len(source) > 80 else source[:80]


Messages = Sequence[Message]


def user(content: str) -> Message:
    return Message("user", content)


def system(content: str) -> Message:
    return Message("system", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt and the data that its environment needs to score a rollout of it.

    Environments subclass this with their own fields. ``id`` names the task in logs and stored rollouts and must be the same in every run
    over the same data.
    """

    id: str
    question: str = ""
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """Consecutive tokens by one author. The policy's turns are trained on; the environment's turns are only context."""

    author: Literal["policy", "environment"]
    tokens: Tensor  # [L] int64
    text: str  # decoded from all its tokens, including special ones, except the one that ends a policy turn
    logprobs: Tensor  # [L] float32, under the sampling distribution; zeros for the environment
    versions: Tensor  # [L] int32, the weight version that sampled each token; -1 for the environment
    columns: Columns = field(default_factory=dict)  # what else was recorded of its tokens, or of those that it read
    num_messages: int = 0  # messages of the rollout that this turn added
    images: tuple[PromptImage, ...] = ()  # images of an observation, in order; positions count on its path
    opening: str = ""  # opening tag of a thought already begun before this turn, such as "<think>"; empty outside of thoughts

    @property
    def sampled(self) -> bool:
        return self.author == "policy"

    @property
    def content(self) -> str:
        """The policy's visible answer: the text without its thoughts (``strop.thoughts.read_answer``)."""
        return read_answer(self.text, self.opening)

    def with_last_read(self, context: int) -> Turn:
        """Return the turn with what was recorded of its own tokens and the last ``context`` read before it; earlier turns have the rest."""

        def cut(column: TokenColumn, values: Tensor) -> Tensor:
            first = max(len(values) - context - len(self.tokens) + 1, 0)
            return values[first:].clone() if column.aligned == "read" else values

        return replace(self, columns={column: cut(column, values) for column, values in self.columns.items()})


def observation_turn(tokens: Sequence[int], text: str, images: Sequence[PromptImage] = ()) -> Turn:
    """Return a turn of the environment: tokens appended to the conversation and never trained on."""
    length = len(tokens)
    return Turn(
        author="environment",
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        text=text,
        logprobs=torch.zeros(length),
        versions=torch.full((length,), -1, dtype=torch.int32),
        images=tuple(images),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Branch:
    """A path that leaves another path of the rollout: a retry, a sub-agent, a rewritten history.

    Its context is the first ``start`` tokens of its parent's path (the prompt included), then its own turns. With ``start`` 0 it shares
    nothing. No sampled token is in two turns of a rollout, so each is trained on once.
    """

    parent: int  # the path it leaves: 0 is the prompt with ``Rollout.turns``, i is ``Rollout.branches[i - 1]``, an earlier branch
    start: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class StepReward:
    """The reward of one step of a rollout, which ends at a token sampled by the policy."""

    token: int  # index of its last token among the rollout's sampled tokens
    reward: float  # weighted


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One trajectory sampled for a task: the tokens of a prompt and of all turns after it.

    During an episode, environments see the rollout so far, with ``ending`` None and no rewards. ``metrics`` is one dict for the whole
    episode: ``rollout.metrics["calls"] = 3``, in ``respond`` or in a reward, is logged and stored.
    """

    task: Task
    sample: int  # index of this sample in its group
    seed: int
    messages: tuple[Message, ...]  # the whole conversation as text
    prompt: Tensor  # [P] int64
    turns: tuple[Turn, ...] = ()
    branches: tuple[Branch, ...] = ()  # for an agent whose requests do not form a single conversation
    ending: Ending | None = None
    version: int = 0  # the weight version of the generators when its group was started: in training, the step
    reward: float = 0.0  # the weighted sum of ``rewards``
    step_rewards: tuple[StepReward, ...] = ()  # the parts of ``reward`` earned by single steps, in order
    turn_advantages: tuple[
        float, ...
    ] = ()  # for each of ``policy_turns``, a value that replaces its advantage; 0: keep it; empty: no turn has one
    turn_states: tuple[str | None, ...] = ()  # for each of ``policy_turns``, the environment's state before it; empty: not known
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # set by the environment during the episode
    output: str = ""  # what an agent printed or returned
    error: str | None = None  # what failed; ``ending`` says who can cause it
    images: tuple[PromptImage, ...] = ()  # images of the prompt, in order
    unscored: bool = False  # a reward returned None: the rollout is left out everywhere, and its reward is 0
    columns: Columns = field(default_factory=dict)  # what was recorded of it as a whole
    role: str = ""  # whose turns these are, if the environment has roles
    others: tuple[Rollout, ...] = ()  # of the other trained roles of this episode, in the order of the environment's roles

    @property
    def counts(self) -> bool:
        """Whether it has a reward to learn from: it was scored, or the policy itself made it fail."""
        return not self.unscored and (self.error is None or (self.ending is not None and self.ending.who == Who.POLICY))

    @property
    def last_turn(self) -> Turn | None:
        """The policy's last turn of the main path."""
        return next((turn for turn in reversed(self.turns) if turn.sampled), None)

    @property
    def text(self) -> str:
        """The text of the policy's last turn: all that it wrote."""
        return "" if self.last_turn is None else self.last_turn.text

    @property
    def opening(self) -> str:
        """Opening tag of a thought in which the policy's last turn began; empty outside of thoughts."""
        return "" if self.last_turn is None else self.last_turn.opening

    @property
    def content(self) -> str:
        """The policy's visible answer in its last turn: the text without its thoughts."""
        return "" if self.last_turn is None else self.last_turn.content

    @property
    def policy_turns(self) -> tuple[Turn, ...]:
        """The policy's turns: those of the main path, then those of each branch."""
        own = tuple(turn for turn in self.turns if turn.sampled)
        return (*own, *(turn for branch in self.branches for turn in branch.turns if turn.sampled)) if self.branches else own

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.tokens.numel() for turn in self.policy_turns)  # len of a tensor is Python

    @property
    def length(self) -> int:
        """Number of tokens of the whole conversation, including the prompt, without branches."""
        return len(self.prompt) + sum(len(turn.tokens) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        return self.ending in (Ending.LENGTH, Ending.CONTEXT)

    @property
    def path_images(self) -> tuple[PromptImage, ...]:
        """The images of the main path: the prompt's, then the observations'."""
        return (*self.images, *(image for turn in self.turns for image in turn.images))

    def tokens(self) -> Tensor:  # [P + L]
        return torch.cat([self.prompt, *(turn.tokens for turn in self.turns)])

    def with_turn(self, turn: Turn, *messages: Message) -> Rollout:
        turn = replace(turn, num_messages=len(messages))
        if turn.columns and any(earlier.sampled for earlier in self.turns):
            observed = sum(len(earlier.tokens) for earlier in takewhile(lambda each: not each.sampled, reversed(self.turns)))
            turn = turn.with_last_read(observed + 1)  # the previous turn's last token had not been read when sampled
        return replace(self, turns=(*self.turns, turn), messages=(*self.messages, *messages))

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        return self.messages[: len(self.messages) - sum(turn.num_messages for turn in self.turns)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one task: the unit for credit, filtering and staleness."""

    index: int  # the position of this task in the run's stream; determines seeds and order
    environment: str
    version: int  # the weight version of the generators when the group was started
    rollouts: tuple[Rollout, ...]
    baseline: Rollout | None = None  # a greedy rollout, for algorithms that use it as a baseline; never trained on
    left_out: tuple[Rollout, ...] = ()  # that have no reward or failed by no fault of the policy: in no baseline, and in no loss

    @property
    def every_rollout(self) -> tuple[Rollout, ...]:
        return (*self.rollouts, *self.left_out)

    def leave_out_failed(self) -> Group:
        """Return the group with rollouts that do not count moved to ``left_out``; unchanged if none counts, or if code raised an
        exception without a cause, which may depend on what the policy wrote.
        """
        present = tuple(rollout for rollout in self.rollouts if rollout.counts)
        if not present or len(present) == len(self.rollouts) or any(each.ending == Ending.ERROR for each in self.rollouts):
            return self
        return replace(self, rollouts=present, left_out=tuple(rollout for rollout in self.rollouts if not rollout.counts))

    def by_role(self) -> tuple[Group, ...]:
        """Return a group for each trained role of its episodes: the unit of credit. Without roles it is the group itself."""
        if not any(rollout.others for rollout in self.rollouts):
            return (self,)
        samples = 1 + max(rollout.sample for rollout in self.every_rollout)
        episodes = [(replace(rollout, others=()), *rollout.others) for rollout in self.rollouts]
        baselines = {} if self.baseline is None else {each.role: each for each in (self.baseline, *self.baseline.others)}
        roles = list(dict.fromkeys(rollout.role for episode in episodes for rollout in episode))
        return tuple(
            replace(
                self,
                rollouts=tuple(
                    replace(rollout, sample=rollout.sample + number * samples)
                    for episode in episodes
                    for rollout in episode
                    if rollout.role == role
                ),
                baseline=baselines.get(role),
                left_out=() if number else self.left_out,
            )
            for number, role in enumerate(roles)
        )

    @property
    def is_unscored(self) -> bool:
        """Whether the group has no reward to learn from: no rollout has one, or the greedy baseline has none."""
        return all(rollout.unscored for rollout in self.rollouts) or (self.baseline is not None and self.baseline.unscored)

    @property
    def task(self) -> Task:
        return self.rollouts[0].task

    @property
    def rewards(self) -> Tensor:  # [G] float64: float32 rounding errors must not look like signal
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float64)

    @property
    def lengths(self) -> Tensor:  # [G] float64: sampled tokens
        return torch.tensor([rollout.sampled_tokens for rollout in self.rollouts], dtype=torch.float64)

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors of rollouts that do not count, which the group cannot be trained on with."""
        rollouts = self.rollouts if self.baseline is None else (*self.rollouts, self.baseline)
        return tuple(rollout.error for rollout in rollouts if rollout.error is not None and not rollout.counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutCredit:
    """The credit of the rollouts of several groups, in order. Packing assigns it to their tokens."""

    rewards: Tensor  # [S] float64, as the algorithm uses them
    advantages: Tensor  # [S] float64
    mask: Tensor  # [S] bool: which rollouts count in the loss
    predict: Literal["tokens", "last_token"] = "tokens"  # credit goes to every sampled token, or to a rollout's last


@dataclass(frozen=True)
class Totals:
    """The denominators of a loss: counts over the whole optimizer step, fixed before it is split into micro-batches (law 1)."""

    tokens: int  # predicted tokens that count in the loss
    sequences: int
    groups: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Packed, flat tensors of many groups.

    The network reads ``tokens`` as a forest of *segments*: contiguous runs, each of which continues its parent (``segment_parent``, -1 for
    a root). With prefix sharing a group is one prompt segment with G children; without it, every rollout is one root segment. A rollout
    with branches has more segments, one path to each of its leaves. A token attends causally within its own segment and to all tokens of
    its ancestors.

    The network predicts N tokens: token n is ``target[n]``, predicted by the output at flat index ``source[n]``, and belongs to rollout
    ``sequence[n]``. Per-token columns have N entries, per-rollout columns S.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    segment_start: Tensor  # [segments] int64, ascending, contiguous
    segment_parent: Tensor  # [segments] int64

    source: Tensor  # [N] int64, index into T
    target: Tensor  # [N] int64, token id
    sequence: Tensor  # [N] int64, index into S
    rollout_logprobs: Tensor  # [N] float32
    versions: Tensor  # [N] int32
    advantages: Tensor  # [N] float32: credit per token
    mask: Tensor  # [N] float32: 1 where the token counts in the loss, 0 where it was filtered out

    leaf: Tensor  # [L] int64: the segments in which the paths of the rollouts end, in the order of the rollouts
    group: Tensor  # [S] int64: the index of the group in this batch
    rewards: Tensor  # [S] float64, as in ``RolloutCredit``

    totals: Totals
    leaf_sequence: Tensor | None = None  # [L] int64, ascending: the rollout of each path; None: every rollout is one path (L = S)
    images: tuple[PromptImage, ...] = ()  # [I], ascending, ``start`` an index into T; an image of a shared prompt appears once
    zero_gradient: Tensor | None = None  # [S] bool: rollouts whose loss gradient is exactly zero; no backward pass is run
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N, ...]
    read_columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [T, ...]: what an engine recorded of what it read
    rollout_columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [S, ...]

    def __post_init__(self) -> None:
        predicted = len(self.target)
        for name in ("source", "sequence", "rollout_logprobs", "versions", "advantages", "mask"):
            if len(getattr(self, name)) != predicted:
                raise ValueError(f"Batch.{name} has {len(getattr(self, name))} entries, but {predicted} tokens are predicted")
        if self.images and (end := max(image.end for image in self.images)) > len(self.tokens):
            raise ValueError(f"Batch.images has an image that ends at token {end}, but {len(self.tokens)} tokens are read")
        for columns, length, what in (
            (self.columns, predicted, "tokens are predicted"),
            (self.read_columns, len(self.tokens), "tokens are read"),
            (self.rollout_columns, len(self.group), "rollouts are packed"),
        ):
            for name, column in columns.items():
                if len(column) != length:
                    raise ValueError(f"Batch column {name!r} has {len(column)} entries, but {length} {what}")

    @property
    def num_sequences(self) -> int:
        return len(self.group)

    @property
    def num_groups(self) -> int:
        return int(self.group.max()) + 1 if len(self.group) else 0

    def rollout_paths(self, sequences: Sequence[int] | None = None) -> list[list[list[int]]]:
        """Return the segments of each path, root first, of the rollouts ``sequences``; None: of all."""
        parents: list[int] = self.segment_parent.tolist()
        chosen = range(self.num_sequences) if sequences is None else sequences
        paths: dict[int, list[list[int]]] = {sequence: [] for sequence in chosen}
        owners = torch.arange(self.num_sequences) if self.leaf_sequence is None else self.leaf_sequence
        selected = torch.isin(owners, torch.tensor([*chosen], dtype=torch.int64))
        for sequence, leaf in zip(owners[selected].tolist(), self.leaf[selected].tolist(), strict=True):
            path, segment = [], leaf
            while segment != -1:
                path.append(segment)
                segment = parents[segment]
            paths[sequence].append(path[::-1])
        return [paths[sequence] for sequence in chosen]

    @property
    def segment_length(self) -> Tensor:  # [segments] int64
        ends = torch.cat([self.segment_start[1:], torch.tensor([len(self.tokens)])])
        return ends - self.segment_start

    @property
    def image_segments(self) -> list[int]:
        """The segment that each image stands in."""
        starts = torch.tensor([image.start for image in self.images], dtype=torch.int64)
        found: list[int] = (
            torch.searchsorted(self.segment_start, starts, right=True) - 1
        ).tolist()  # the last segment starting there
        return found

    @property
    def sequence_lengths(self) -> Tensor:  # [S] float32: number of predicted tokens that count, per rollout
        return self.mask.new_zeros(self.num_sequences).index_add_(0, self.sequence, self.mask)

    def split(self, column: Tensor) -> tuple[Tensor, ...]:
        """Split a column [N, ...] by rollout: S parts, each with the rollout's tokens in their order."""
        lengths = torch.bincount(self.sequence, minlength=self.num_sequences).tolist()
        ascending = bool((self.sequence.diff() >= 0).all())
        parts: tuple[Tensor, ...] = (column if ascending else column[self.sequence.argsort(stable=True)]).split(lengths)
        return parts

    def column(self, name: str) -> Tensor:  # [N]
        """Return the column ``name``. Raises KeyError, listing the existing columns, if there is none."""
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r}; it has {sorted(self.columns)}")
        return self.columns[name]

    def with_column(self, name: str, column: Tensor) -> Batch:
        return self.with_columns({name: column})

    def with_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        return replace(self, columns={**self.columns, **columns}) if columns else self

    def with_totals(self) -> Batch:
        """Set the denominators of the loss. Call it on the batch of one optimizer step, before it is split into micro-batches."""
        counted = self.sequence_lengths > 0
        totals = Totals(tokens=int(self.mask.sum()), sequences=int(counted.sum()), groups=len(self.group[counted].unique()))
        return replace(self, totals=totals)

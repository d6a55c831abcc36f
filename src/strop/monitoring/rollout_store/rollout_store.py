"""Store every rollout of every step: prompt, completion, rewards, and log-probabilities under sampler and learner.

    <log folder>/rollouts/step_000012.parquet          one row per rollout, including dropped groups
    <log folder>/rollouts/step_000012_ratios.jsonl     the tokens with the largest mismatch (see ``token_ratios``)

Files are written atomically. A step that runs again replaces its file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from strop.monitoring.atomic_file import atomic_write
from strop.monitoring.rollout_store.token_ratios import Decode, TokenRatio, find_largest_ratios, read_ratios, write_ratios
from strop.types import Batch, Group, Rollout

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped,unused-ignore]

StoreFormat = Literal["parquet", "jsonl", "none"]
DropReason = Literal["filtered", "error", "stale"]
RolloutKey = tuple[int, int]  # (group index, sample): identifies a rollout in a run

ROLLOUTS_FOLDER = "rollouts"
_FILE_PATTERN = re.compile(r"step_(\d+)\.(parquet|jsonl)")
_RATIOS_PATTERN = re.compile(r"step_(\d+)_ratios\.jsonl")


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout. Per-token columns cover the conversation after the prompt, including the environment's turns."""

    step: int
    group: int
    environment: str
    task_id: str
    sample: int
    prompt: str
    completion: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]  # True: by the policy; False: from the environment
    sampler_logprobs: tuple[float, ...]  # 0 for tokens of the environment
    learner_logprobs: tuple[float, ...] | None  # likewise; None if the learner did not score the rollout
    versions: tuple[int, ...]  # weights version that sampled the token; -1 for tokens of the environment
    advantage: float | None  # None for a dropped group
    reward: float
    rewards: Mapping[str, float]
    ending: str
    error: str | None
    kept: bool
    dropped_because: DropReason | None


class RolloutStore:
    """Stores the rollouts of a run, one file per step in ``<log_dir>/rollouts``. Format ``none`` writes nothing."""

    def __init__(self, log_dir: Path, format: StoreFormat = "parquet", *, decode: Decode | None = None) -> None:
        """Open the store. ``decode`` is the tokenizer's, for the texts in the ratios file; default: token ids. Raises ImportError."""
        if format not in ("parquet", "jsonl", "none"):
            raise ValueError(f"rollouts cannot be stored as {format!r}; set one of parquet, jsonl, none")
        if format == "parquet":
            _import_pyarrow()  # fail when the run starts, not after its first step
        self.folder = Path(log_dir) / ROLLOUTS_FOLDER
        self.format = format
        self._decode = decode or (lambda tokens: " ".join(map(str, tokens)))

    def write(self, step: int, records: Sequence[RolloutRecord]) -> Path | None:
        """Store the rollouts of ``step``, replacing earlier ones of this step. Returns the path."""
        if self.format == "none":
            return None
        path = self.folder / f"step_{step:06d}.{self.format}"
        with atomic_write(path) as draft:
            (_write_parquet if self.format == "parquet" else _write_jsonl)(draft, records)
        for other in self._files_by_step().get(step, ()):
            if other != path:  # the format changed between two attempts of the run
                other.unlink()
        self._write_ratios(step, records)
        return path

    def read(self, step: int) -> list[RolloutRecord]:
        """Read the rollouts of ``step``. Raises FileNotFoundError."""
        files = self._files_by_step()
        if step not in files:
            raise FileNotFoundError(f"no rollouts of step {step} in {self.folder}; stored are {_describe_steps(sorted(files))}")
        path = files[step][0]
        return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)

    def read_ratios(self, step: int) -> list[TokenRatio]:
        """Read the tokens of a step with the largest mismatch, the largest |log ratio| first. Empty if sampler and learner agree."""
        path = self._ratios_path(step)
        return read_ratios(path) if path.exists() else []

    def _ratios_path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}_ratios.jsonl"

    def _write_ratios(self, step: int, records: Sequence[RolloutRecord]) -> None:
        path, rows = self._ratios_path(step), find_largest_ratios(records, self._decode)
        if not rows:
            path.unlink(missing_ok=True)
            return
        with atomic_write(path) as draft:
            write_ratios(draft, rows)

    def read_all(self) -> Iterator[RolloutRecord]:
        """Iterate over all rollouts in step order, holding one step in memory at a time."""
        for step in self.steps():
            yield from self.read(step)

    def steps(self) -> list[int]:
        return sorted(self._files_by_step())

    def resume(self, step: int) -> None:
        """Remove the rollouts of later steps, which will run again, and temporary files of a killed run."""
        for later, paths in self._files_by_step().items():
            if later > step:
                for path in paths:
                    path.unlink()
        for path in self.folder.glob("step_*_ratios.jsonl"):
            if (match := _RATIOS_PATTERN.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()
        for draft in self.folder.glob(".step_*.tmp"):
            draft.unlink()

    def _files_by_step(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in sorted(self.folder.glob("step_*")):
            if match := _FILE_PATTERN.fullmatch(path.name):
                found.setdefault(int(match[1]), []).append(path)
        return found


def make_records(
    step: int,
    groups: Sequence[Group],
    *,
    advantages: Mapping[RolloutKey, float] | None = None,
    learner_logprobs: Mapping[RolloutKey, Tensor] | None = None,
    dropped: Mapping[int, DropReason] | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> list[RolloutRecord]:
    """Build the records of a step's groups, including dropped ones.

    ``advantages`` and ``learner_logprobs`` are keyed by (group.index, rollout.sample) and omit dropped rollouts. The
    log-probabilities cover the rollout's sampled tokens, or all its tokens after the prompt. ``dropped`` maps group.index to
    the reason. ``decode`` is the tokenizer's, for the prompt exactly as the model reads it; without it the messages are stored.
    """
    credit, scored, why = advantages or {}, learner_logprobs or {}, dropped or {}
    return [
        _make_record(
            step,
            group,
            rollout,
            advantage=credit.get((group.index, rollout.sample)),
            learner=scored.get((group.index, rollout.sample)),
            dropped=why.get(group.index),
            prompt=decode(rollout.prompt.tolist()) if decode else _format_prompt(rollout),
        )
        for group in groups
        for rollout in group.rollouts
    ]


def split_by_rollout(column: Tensor, batch: Batch, groups: Sequence[Group]) -> dict[RolloutKey, Tensor]:
    """Split a column of ``batch`` ([N], over predicted tokens) by rollout. ``groups`` are those it was packed from, in order."""
    keys = [(group.index, rollout.sample) for group in groups for rollout in group.rollouts]
    if len(keys) != batch.num_sequences:
        raise ValueError(
            f"the batch has {batch.num_sequences} rollouts and the groups {len(keys)}: pass the groups that it was packed from"
        )
    sequence, column = batch.sequence.cpu(), column.detach().cpu()
    return {key: column[sequence == index] for index, key in enumerate(keys)}


def _make_record(
    step: int,
    group: Group,
    rollout: Rollout,
    *,
    advantage: float | None,
    learner: Tensor | None,
    dropped: DropReason | None,
    prompt: str,
) -> RolloutRecord:
    turns = rollout.turns
    sampled = tuple(turn.sampled for turn in turns for _ in range(len(turn.tokens)))
    return RolloutRecord(
        step=step,
        group=group.index,
        environment=group.environment,
        task_id=rollout.task.id,
        sample=rollout.sample,
        prompt=prompt,
        completion="".join(turn.text for turn in turns),
        prompt_tokens=tuple(rollout.prompt.tolist()),
        tokens=tuple(token for turn in turns for token in turn.tokens.tolist()),
        sampled=sampled,
        sampler_logprobs=tuple(value for turn in turns for value in turn.logprobs.tolist()),
        learner_logprobs=None if learner is None else _expand_to_all_tokens(learner, sampled),
        versions=tuple(version for turn in turns for version in turn.versions.tolist()),
        advantage=None if advantage is None else float(advantage),
        reward=float(rollout.reward),
        rewards={name: float(value) for name, value in rollout.rewards.items()},
        ending="" if rollout.ending is None else rollout.ending.value,
        error=rollout.error,
        kept=dropped is None,
        dropped_because=dropped,
    )


def _expand_to_all_tokens(logprobs: Tensor, sampled: tuple[bool, ...]) -> tuple[float, ...]:
    values = logprobs.tolist()
    if len(values) == len(sampled):
        return tuple(values)
    if len(values) != sum(sampled):
        raise ValueError(
            f"{len(values)} learner log-probs for a rollout of {len(sampled)} tokens, {sum(sampled)} of them sampled: "
            "give one for each sampled token, or one for each token"
        )
    rest = iter(values)
    return tuple(next(rest) if mine else 0.0 for mine in sampled)


def _format_prompt(rollout: Rollout) -> str:
    """Return the messages before the policy's first turn. Counts from the end, since a prompt may contain assistant messages."""
    said = [place for place, message in enumerate(rollout.messages) if message.role == "assistant"]
    mine = len(rollout.policy_turns)
    end = said[-mine] if 0 < mine <= len(said) else len(rollout.messages)
    return "\n".join(f"{message.role}: {message.content}" for message in rollout.messages[:end])


def _write_parquet(path: Path, records: Sequence[RolloutRecord]) -> None:
    pa, pq = _import_pyarrow()
    rows = [{**_to_dict(record), "rewards": list(record.rewards.items())} for record in records]
    pq.write_table(pa.Table.from_pylist(rows, schema=_build_schema(pa)), path, compression="zstd")


def _read_parquet(path: Path) -> list[RolloutRecord]:
    _, pq = _import_pyarrow()
    return [_from_dict({**row, "rewards": dict(row["rewards"])}) for row in pq.read_table(path).to_pylist()]


def _build_schema(pa: Any) -> pyarrow.Schema:
    """Return the Arrow schema: float32 log-probabilities, as computed; float64 rewards and advantages."""
    types = {
        "step": pa.int64(),
        "group": pa.int64(),
        "sample": pa.int64(),
        "prompt_tokens": pa.list_(pa.int32()),
        "tokens": pa.list_(pa.int32()),
        "sampled": pa.list_(pa.bool_()),
        "sampler_logprobs": pa.list_(pa.float32()),
        "learner_logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "advantage": pa.float64(),
        "reward": pa.float64(),
        "rewards": pa.map_(pa.string(), pa.float64()),
        "kept": pa.bool_(),
    }
    return pa.schema([(field.name, types.get(field.name, pa.string())) for field in fields(RolloutRecord)])


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"rollouts are stored as parquet, but pyarrow cannot be imported ({error}); "
            "install it (pip install pyarrow), or store them as jsonl"
        ) from error
    return pyarrow, pyarrow.parquet


def _write_jsonl(path: Path, records: Sequence[RolloutRecord]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(_encode_nonfinite(_to_dict(record)), ensure_ascii=False, allow_nan=False) + "\n")


def _read_jsonl(path: Path) -> list[RolloutRecord]:
    with path.open(encoding="utf-8") as file:
        return [_from_dict(json.loads(line)) for line in file]


def _encode_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by the strings "nan", "inf" and "-inf", which float() parses: JSON does not have them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _encode_nonfinite(part) for name, part in value.items()}
    return [_encode_nonfinite(part) for part in value] if isinstance(value, tuple) else value


def _to_dict(record: RolloutRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _from_dict(row: Mapping[str, Any]) -> RolloutRecord:
    def floats(values: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(value) for value in values)

    return RolloutRecord(
        **{
            **row,
            **{name: tuple(row[name]) for name in ("prompt_tokens", "tokens", "sampled", "versions")},
            "sampler_logprobs": floats(row["sampler_logprobs"]),
            "learner_logprobs": None if row["learner_logprobs"] is None else floats(row["learner_logprobs"]),
            "advantage": None if row["advantage"] is None else float(row["advantage"]),
            "reward": float(row["reward"]),
            "rewards": {name: float(value) for name, value in row["rewards"].items()},
        }
    )


def _describe_steps(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "none"

"""Store every rollout of every step: prompt, completion, rewards, and log-probabilities under sampler and learner.

    <log folder>/rollouts/step_000012.parquet          one row per rollout, including dropped groups
    <log folder>/rollouts/step_000012_ratios.jsonl     the tokens with the largest mismatch (see ``token_ratios``)
    <log folder>/rollouts/step_000012_flags.jsonl      the rollouts flagged by the reward hacking monitor (see ``rollout_flags``)

    <log folder>/rollouts/images/DIGEST.png            images of prompts and observations, each once

Files are written atomically. A step that runs again replaces its file. If the disk is full, files wait in memory and are written
when there is room.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strop.monitoring.rollout_store.learner_inputs import StoredSets, decode_columns, decode_inputs, make_set_column
from strop.monitoring.rollout_store.rollout_flags import FlaggedRollouts, RolloutFlag, encode_flags, group_flags, read_flags
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord, replace_surrogates
from strop.monitoring.rollout_store.stored_files import naming_damage, read_table
from strop.monitoring.rollout_store.stored_images import StoredImages
from strop.monitoring.rollout_store.token_ratios import Decode, TokenRatio, encode_ratios, find_largest_ratios, read_ratios
from strop.monitoring.rollout_store.token_values import (
    BY_TERM,
    FLAGS,
    FLOATS,
    TokenColumns,
    TokenValues,
    make_arrow_columns,
    make_list_column,
)
from strop.monitoring.rollout_store.token_values import NAMES as LEDGER
from strop.storage.files import RecordFiles

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped,unused-ignore]

    from strop.types import PromptImage

log = logging.getLogger(__name__)

StoreFormat = Literal["parquet", "jsonl", "none"]

ROLLOUTS_FOLDER = "rollouts"
_FILE_PATTERN = re.compile(r"step_(\d+)\.(parquet|jsonl)")
OF_TOKENS = ("prompt_tokens", "tokens", "sampled", "sampler_logprobs", "learner_logprobs", "versions")
_BESIDE_PATTERN = re.compile(r"step_(\d+)_(?:ratios|flags)\.jsonl")


class RolloutStore:
    """Stores the rollouts of a run, one file per step in ``<log_dir>/rollouts``. Format ``none`` writes nothing."""

    def __init__(self, log_dir: Path, format: StoreFormat = "parquet", *, decode: Decode | None = None) -> None:
        """Open the store. ``decode`` is the tokenizer's, for the texts in the ratios file; default: token ids. Raises ImportError."""
        if format not in ("parquet", "jsonl", "none"):
            raise ValueError(f"rollouts cannot be stored as {format!r}; set one of parquet, jsonl, none")
        if format == "parquet":
            _import_pyarrow()  # report a missing pyarrow at the start of the run, not after its first step
        self.folder = Path(log_dir).absolute() / ROLLOUTS_FOLDER
        self.format = format
        self._noted_surrogates = False
        self._files = RecordFiles("rollouts")
        self.images = StoredImages(self.folder)
        self.decode = decode or (lambda tokens: " ".join(map(str, tokens)))

    def write(self, step: int, records: Sequence[RolloutRecord], tokens: TokenColumns | None = None) -> Path | None:
        """Store the rollouts of ``step``, replacing earlier ones of this step. Returns the path.

        ``tokens``: results of the update for the trained rollouts, which come first among the records.
        """
        if self.format == "none":
            return None
        records = self._replace_surrogates(step, records)
        path = self.folder / f"step_{step:06d}.{self.format}"
        self._files.write(path, (_encode_parquet if self.format == "parquet" else _encode_jsonl)(records, tokens))
        other = path.with_suffix(".jsonl" if self.format == "parquet" else ".parquet")
        other.unlink(missing_ok=True)  # the format changed between two attempts of the run
        self._write_ratios(step, records)
        return path

    def write_images(self, images: Iterable[PromptImage]) -> None:
        """Store the images shown in a step's rollouts, unless already stored."""
        if self.format != "none":
            self.images.write(images, self._files)

    def _replace_surrogates(self, step: int, records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Return the records with storable texts, with one warning per run."""
        stored = [replace_surrogates(record) for record in records]
        changed = [record for record, original in zip(stored, records, strict=True) if record != original]
        if changed and not self._noted_surrogates:
            self._noted_surrogates = True
            log.warning(
                "step %d: the environment %s gave text with lone surrogates, which UTF-8 cannot encode (task %r, first); they are stored "
                "as \N{REPLACEMENT CHARACTER}. Decode what it reads with errors='replace'",
                step, changed[0].environment, changed[0].task_id,
            )  # fmt: skip
        return stored

    def read(self, step: int, task_id: str | None = None, *, ledger: bool = True) -> list[RolloutRecord]:
        """Read the rollouts of ``step``, or those of one task; ``ledger=False`` leaves out the per-token results of the update.

        Raises FileNotFoundError, DamagedRollouts."""
        path, filters = self.path(step), None if task_id is None else [("task_id", "==", task_id)]
        with naming_damage(path):
            return _read_parquet(path, filters, ledger=ledger) if path.suffix == ".parquet" else _read_jsonl(path, task_id)

    def path(self, step: int) -> Path:
        """Return the file of ``step``. Raises FileNotFoundError."""
        files = self._files_by_step()
        if step not in files:
            raise FileNotFoundError(f"no rollouts of step {step} in {self.folder}; stored are {_describe_steps(sorted(files))}")
        return files[step][0]

    def read_one(self, step: int, group: int, sample: int) -> RolloutRecord | None:
        """Read one rollout of ``step``; None if it is not among them. Raises FileNotFoundError, DamagedRollouts."""
        path, filters = self.path(step), [("group", "==", group), ("sample", "==", sample)]
        with naming_damage(path):
            records = _read_parquet(path, filters) if path.suffix == ".parquet" else _read_jsonl(path, None)
        return next((record for record in records if (record.group, record.sample) == (group, sample)), None)

    def read_keys(self, step: int) -> list[tuple[int, int, str]]:
        """Read (group, sample, task id) of the rollouts of ``step``. Raises FileNotFoundError, DamagedRollouts."""
        path, names = self.path(step), ["group", "sample", "task_id"]
        with naming_damage(path):
            if path.suffix == ".parquet":
                rows = read_table(path, names).to_pylist()
            else:
                with path.open(encoding="utf-8") as file:
                    rows = [json.loads(line) for line in file]
            return [(row["group"], row["sample"], row["task_id"]) for row in rows]

    def read_ratios(self, step: int) -> list[TokenRatio]:
        """Read the tokens of a step with the largest mismatch, the largest |log ratio| first. Empty if sampler and learner agree."""
        path = self._ratios_path(step)
        return read_ratios(path) if path.exists() else []

    def flag(self, flags: Sequence[RolloutFlag]) -> None:
        """Store flags of the monitor, in addition to earlier flags of the same steps."""
        for step in sorted({flag.step for flag in flags}) if self.format != "none" else ():
            path = self._flags_path(step)
            self._files.write(path, encode_flags([*read_flags(path), *(flag for flag in flags if flag.step == step)]))

    def read_flags(self, step: int) -> FlaggedRollouts:
        """Read the detectors that flagged rollouts of a step. Raises DamagedRollouts."""
        path = self._flags_path(step)
        with naming_damage(path):
            return group_flags(read_flags(path))

    def _flags_path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}_flags.jsonl"

    def _ratios_path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}_ratios.jsonl"

    def _write_ratios(self, step: int, records: Sequence[RolloutRecord]) -> None:
        path, rows = self._ratios_path(step), find_largest_ratios(records, self.decode)
        if not rows:
            path.unlink(missing_ok=True)
            return
        self._files.write(path, encode_ratios(rows))

    def read_all(self) -> Iterator[RolloutRecord]:
        """Iterate over all rollouts in step order, holding one step in memory at a time. Raises DamagedRollouts."""
        for step in self.steps():
            yield from self.read(step)

    def steps(self) -> list[int]:
        return sorted(self._files_by_step())

    def resume(self, step: int) -> None:
        """Remove the rollouts of later steps, which will run again, and temporary files of a killed run. Warn if earlier ones are
        missing.
        """
        stored = self._files_by_step()
        if self.format != "none" and (gone := [each for each in range(1, step + 1) if each not in stored]):
            log.warning(
                "%s has no rollouts of %s (of %d before the run continues): they were deleted or moved, or logger.rollouts was none. The "
                "run does not need them; strop replay, strop ledger and strop view cannot show them",
                self.folder, _describe_steps(gone), step,
            )  # fmt: skip
        for later, paths in stored.items():
            if later > step:
                for path in paths:
                    path.unlink()
        for path in self.folder.glob("step_*_*.jsonl"):
            if (match := _BESIDE_PATTERN.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()
        for temporary in self.folder.glob(".step_*.tmp"):
            temporary.unlink()

    def _files_by_step(self) -> dict[int, list[Path]]:
        files: dict[int, list[Path]] = {}
        for path in sorted(self.folder.glob("step_*")):
            if match := _FILE_PATTERN.fullmatch(path.name):
                files.setdefault(int(match[1]), []).append(path)
        return files


def _encode_parquet(records: Sequence[RolloutRecord], tokens: TokenColumns | None = None) -> bytes:
    pa, pq = _import_pyarrow()
    names = dict.fromkeys(name for record in records for name in record.columns)
    ragged = {name for name in names for record in records if isinstance(record.columns.get(name), StoredSets)}
    rows = [
        {
            **to_row(_without_tokens(record, ragged)),
            **dict.fromkeys(OF_TOKENS),
            "rewards": list(record.rewards.items()),
            **{name: list(getattr(record, name).items()) for name in ("metrics", *BY_TERM)},
            "prompt_images": [{"message": message, "image": image} for message, image in record.prompt_images],
            "step_rewards": [{"token": token, "reward": reward} for token, reward in record.step_rewards or ()],
        }
        for record in records
    ]
    content = io.BytesIO()
    schema = _build_schema(pa, [name for name in names if name not in ragged])
    table = pa.Table.from_pylist(rows, schema=schema)
    for name in OF_TOKENS:
        column = make_list_column([getattr(record, name) for record in records], schema.field(name).type.value_type)
        table = table.set_column(schema.get_field_index(name), schema.field(name), column)
    if tokens is not None:
        for name, column in make_arrow_columns(tokens, [record.sampled for record in records]).items():
            table = table.set_column(table.column_names.index(name), name, column)
    for name in ragged:
        stored = [record.columns.get(name) for record in records]
        table = table.append_column(name, make_set_column([each if isinstance(each, StoredSets) else None for each in stored]))
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


def _without_tokens(record: RolloutRecord, ragged: Container[str]) -> RolloutRecord:
    """Return the record without what is written from arrays."""
    columns = {name: each for name, each in record.columns.items() if name not in ragged}
    return replace(
        record,
        columns=columns, prompt_tokens=(), tokens=(), sampled=(), sampler_logprobs=(), learner_logprobs=(), versions=(),
    )  # fmt: skip


def _read_parquet(path: Path, filters: Sequence[tuple[str, str, object]] | None, *, ledger: bool = True) -> list[RolloutRecord]:
    _, pq = _import_pyarrow()
    columns = None if ledger else [name for name in pq.read_schema(path).names if name not in LEDGER]
    return decode_rows(read_table(path, columns, filters).to_pylist())


def decode_rows(rows: Iterable[Mapping[str, Any]]) -> list[RolloutRecord]:
    """Return the records of rows of a parquet file, as plain values."""
    mappings = ("rewards", "metrics", *BY_TERM)
    return [
        _from_row(
            {
                **row,
                **{name: dict(row.get(name) or ()) for name in mappings},
                "prompt_images": [(each["message"], each["image"]) for each in row.get("prompt_images") or ()],
                "step_rewards": _read_steps(row.get("step_rewards")),
            }
        )
        for row in rows
    ]


def _build_schema(pa: Any, columns: Iterable[str]) -> pyarrow.Schema:
    """Return the Arrow schema: float32 log-probabilities, as computed; float64 rewards and advantages. ``columns``: further names."""
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
        "prompt_messages": pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", "reasoning")])),
        "turns": pa.list_(
            pa.struct([
                ("role", pa.string()), ("text", pa.string()), ("start", pa.int64()), ("end", pa.int64()), ("sampled", pa.bool_()),
                ("versions", pa.list_(pa.int32())), ("reward", pa.float64()), ("calls", pa.list_(pa.string())), ("tool", pa.string()),
                ("path", pa.int64()), ("state", pa.string()), ("images", pa.list_(pa.string())), ("reasoning", pa.string()),
            ])
        ),
        "branches": pa.list_(pa.list_(pa.int64())),
        "prompt_images": pa.list_(pa.struct([("message", pa.int64()), ("image", pa.string())])),
        "metrics": pa.map_(pa.string(), pa.float64()),
        **{name: pa.list_(pa.float32()) for name in FLOATS},
        **{name: pa.list_(pa.bool_()) for name in FLAGS},
        "mask_reason": pa.list_(pa.string()),
        **{name: pa.map_(pa.string(), pa.list_(pa.float32())) for name in BY_TERM},
        "group_version": pa.int64(),
        "step_rewards": pa.list_(pa.struct([("token", pa.int64()), ("reward", pa.float64())])),
        "turn_advantages": pa.list_(pa.float64()),
        "baseline": pa.struct([("reward", pa.float64()), ("tokens", pa.int64()), ("ending", pa.string())]),
        "image_places": pa.list_(
            pa.struct([("turn", pa.int64()), ("start", pa.int64()), ("length", pa.int64()), ("image", pa.string())])
        ),
    }  # fmt: skip
    column = pa.list_(pa.struct([("turn", pa.int64()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())]))
    own = [(field.name, types.get(field.name, pa.string())) for field in fields(RolloutRecord) if field.name != "columns"]
    return pa.schema([*own, *((name, column) for name in columns)])


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


def _encode_jsonl(records: Sequence[RolloutRecord], tokens: TokenColumns | None = None) -> bytes:
    if tokens is not None:
        found = tokens.split([record.sampled for record in records[: tokens.num_rollouts]])
        trained = [replace(record, **columns) for record, columns in zip(records, found, strict=False)]
        records = [*trained, *records[len(trained) :]]
    return "".join(encode_json(record) + "\n" for record in records).encode()


def _read_jsonl(path: Path, task_id: str | None) -> list[RolloutRecord]:
    with path.open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        return [_from_row(row) for row in rows if task_id in (None, row["task_id"])]


def encode_json(record: RolloutRecord, *, ascii_only: bool = False) -> str:
    """Return the record as a line of JSON."""
    return json.dumps(_encode_for_json(to_row(record)), ensure_ascii=ascii_only, allow_nan=False)


def _encode_for_json(value: Any) -> Any:
    """Replace values that JSON lacks: NaN and infinities by the strings "nan", "inf" and "-inf", which float() parses, bytes by
    base64.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Mapping):
        return {name: _encode_for_json(item) for name, item in value.items()}
    return [_encode_for_json(item) for item in value] if isinstance(value, tuple | list) else value


def to_row(record: RolloutRecord) -> dict[str, Any]:
    """Return the record as plain values: one column for each field, and for each of its columns."""
    sets = {name: each.to_lists() for name, each in record.columns.items() if isinstance(each, StoredSets)}
    lists = {name: each for name, each in record.columns.items() if not isinstance(each, StoredSets)}
    lists |= {name: getattr(record, name) for name in ("turns", "image_places")}
    return {
        **{
            name: tuple(value) if isinstance(value, TokenValues) else value
            for name, value in vars(record).items()
            if name != "columns"
        },
        **{name: None if each is None else [dict(vars(item)) for item in each] for name, each in lists.items()},
        "baseline": None if record.baseline is None else dict(vars(record.baseline)),
        **sets,
    }


def _from_row(row: Mapping[str, Any]) -> RolloutRecord:
    def floats(values: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(value) for value in values)

    known = {field.name for field in fields(RolloutRecord)}
    return RolloutRecord(
        **{
            **{name: value for name, value in row.items() if name in known},  # a later version may store more
            **{name: tuple(row[name]) for name in ("prompt_tokens", "tokens", "sampled", "versions")},
            "sampler_logprobs": floats(row["sampler_logprobs"]),
            "learner_logprobs": None if row["learner_logprobs"] is None else floats(row["learner_logprobs"]),
            "advantage": None if row["advantage"] is None else float(row["advantage"]),
            "reward": float(row["reward"]),
            "rewards": {name: float(value) for name, value in row["rewards"].items()},
            "metrics": {name: float(value) for name, value in row.get("metrics", {}).items()},
            "prompt_messages": tuple(
                {name: text for name, text in message.items() if text is not None} for message in row.get("prompt_messages", ())
            ),
            "branches": tuple((parent, start) for parent, start in row.get("branches", ())),
            "prompt_images": tuple((message, image) for message, image in row.get("prompt_images", ())),
            **_token_columns(row, floats),
            **decode_inputs(row),
            "columns": decode_columns({name: value for name, value in row.items() if name not in known}),
            "turns": tuple(
                TurnRecord(
                    **{
                        **turn,
                        "versions": tuple(turn["versions"]),
                        "reasoning": turn.get("reasoning") or "",
                        **{name: tuple(turn.get(name) or ()) for name in ("calls", "images")},
                    }
                )
                for turn in row.get("turns", ())
            ),
        }
    )


def _read_steps(steps: Sequence[Mapping[str, Any]] | None) -> list[tuple[int, float]] | None:
    return None if steps is None else [(step["token"], step["reward"]) for step in steps]


def _token_columns(row: Mapping[str, Any], floats: Callable[[Sequence[Any]], tuple[float, ...]]) -> dict[str, Any]:
    """Return the per-token columns, None or empty for those missing in files of earlier versions."""

    def read(name: str, convert: Callable[[Any], Any] = tuple) -> Any:
        return None if row.get(name) is None else convert(row[name])

    return {
        **{name: read(name, floats) for name in (*FLOATS, "turn_advantages")},
        **{name: read(name) for name in (*FLAGS, "mask_reason")},
        **{name: {term: floats(values) for term, values in (row.get(name) or {}).items()} for name in BY_TERM},
        "step_rewards": read("step_rewards", lambda steps: tuple((token, float(reward)) for token, reward in steps)),
    }


def _describe_steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"1 step, {steps[0]}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "none"

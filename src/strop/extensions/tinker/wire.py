"""What the Tinker SDK sends and gets: its protobuf messages, its data as a batch, and its names of saved weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor

from strop.generation.base import Completion
from strop.types import Batch, Totals

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"


class TinkerRequestError(ValueError):
    """A request that cannot be served as it is. The message says why, and what can."""


@dataclass(frozen=True, eq=False)
class TrainingDatum:
    """One sequence: the tokens that the model reads, and for each of them what is predicted after it."""

    tokens: Tensor  # [T] int64
    inputs: Mapping[str, Tensor]  # name -> [T], among them TARGETS, the token predicted after each


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBackwardCall:
    """A call of ``forward`` or ``forward_backward``."""

    model_id: str
    seq_id: int  # its place among the calls of this model
    data: Sequence[TrainingDatum]
    loss: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def make_batch(data: Sequence[TrainingDatum], needed: Sequence[str]) -> Batch:
    """Put the data side by side; every token predicts its target. Raises TinkerRequestError if an input is missing or does not fit."""
    if not data:
        raise TinkerRequestError("forward_backward needs at least one datum")
    for index, datum in enumerate(data):
        for name in (TARGETS, *needed):
            _check_input(index, datum, name)
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    columns = {name: torch.cat([datum.inputs[name].float() for datum in data]) for name in needed}
    zeros = torch.zeros(int(lengths.sum()))
    return Batch(
        tokens=torch.cat([datum.tokens for datum in data]),
        positions=torch.cat([torch.arange(len(datum.tokens)) for datum in data]),
        segment_start=lengths.cumsum(0) - lengths,
        segment_parent=torch.full((len(data),), -1),
        source=torch.arange(len(zeros)),
        target=torch.cat([datum.inputs[TARGETS].long() for datum in data]),
        sequence=torch.arange(len(data)).repeat_interleave(lengths),
        rollout_logprobs=columns.get(LOGPROBS, zeros),
        versions=torch.zeros(len(zeros), dtype=torch.int32),
        advantages=columns.get(ADVANTAGES, zeros),
        mask=torch.ones(len(zeros)),
        leaf=torch.arange(len(data)),
        group=torch.arange(len(data)),
        rewards=torch.zeros(len(data), dtype=torch.float64),
        totals=Totals(len(zeros), len(data), len(data)),
        columns={WEIGHTS: columns[WEIGHTS]} if WEIGHTS in columns else {},
    )


def _check_input(index: int, datum: TrainingDatum, name: str) -> None:
    given = datum.inputs.get(name)
    if given is None:
        raise TinkerRequestError(
            f"datum {index} has no loss_fn_inputs[{name!r}]; it has {', '.join(sorted(datum.inputs)) or 'none'}"
        )
    if given.dim() != 1:
        raise TinkerRequestError(
            f"loss_fn_inputs[{name!r}] of datum {index} has {given.dim()} dimensions; several targets of one position are not served here"
        )
    if len(given) != len(datum.tokens):
        raise TinkerRequestError(
            f"loss_fn_inputs[{name!r}] of datum {index} has {len(given)} entries and its model_input {len(datum.tokens)} tokens; both "
            "need one for each position"
        )


CONTENT_TYPE = "application/x-protobuf"
_DTYPES = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64, wire.DTYPE_INT32: np.int32}


def read_forward_backward(body: bytes) -> ForwardBackwardCall:
    """Parse the body of ``forward_backward``. Raises TinkerRequestError."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise TinkerRequestError(f"the body is not a ForwardBackwardRequest: {error}") from error
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.HasField("text") else value.number
    try:
        data = [_read_datum(datum) for datum in message.data]
    except ValueError as error:
        if isinstance(error, TinkerRequestError):
            raise
        raise TinkerRequestError(f"an array of the data does not have the bytes of its type and shape: {error}") from error
    return ForwardBackwardCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        options=options,
        forward_only=message.forward_only,
    )


def _read_datum(message: Any) -> TrainingDatum:
    chunks: list[Tensor] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise TinkerRequestError("only text can be trained on here: a datum has a chunk of an image or of sound")
        chunks.append(torch.from_numpy(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).astype(np.int64)))
    tokens = torch.cat(chunks) if chunks else torch.zeros(0, dtype=torch.int64)
    if not len(tokens):
        raise TinkerRequestError("a datum has no tokens")
    return TrainingDatum(tokens, {name: _read_tensor(name, tensor) for name, tensor in message.loss_fn_inputs.items()})


def _read_tensor(name: str, message: Any) -> Tensor:
    if message.HasField("sparse_csr") or message.dtype not in _DTYPES:
        raise TinkerRequestError(f"loss_fn_inputs[{name!r}] is sparse or of an unknown type; send a dense float32 or int64 array")
    array = np.frombuffer(message.dense, dtype=_DTYPES[message.dtype]).copy()
    return torch.from_numpy(array).reshape(tuple(message.shape) or (len(array),))


def write_forward_backward(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return the answer to ``forward_backward``: the log-probabilities of each datum, [T] float32, and metrics."""
    message = wire.ForwardBackwardOutput()
    message.loss_fn_output_type = "TorchLossReturn"
    record = message.loss_fn_outputs.add()
    record.num_datums = len(logprobs)
    sizes = [4 * len(one) for one in logprobs]
    field = record.fields["logprobs"]
    field.dtype = wire.DTYPE_FLOAT32
    field.data = torch.cat([*logprobs]).float().numpy().tobytes()
    field.offsets = np.cumsum([0, *sizes]).astype(np.int64).tobytes()
    for name, value in metrics.items():
        message.metrics[name] = value
    body: bytes = message.SerializeToString()
    return body


def write_samples(completions: Sequence[Completion], prompt_logprobs: Tensor | None) -> bytes:
    """Return the answer to ``asample``. ``prompt_logprobs`` [P], NaN for the first token; None if they were not asked for."""
    message = wire.SampleResponse()
    for completion in completions:
        sequence = message.sequences.add()
        sequence.tokens = completion.tokens.numpy().astype(np.int32).tobytes()
        sequence.logprobs = completion.logprobs.float().numpy().tobytes()
        sequence.stop_reason = wire.STOP_REASON_STOP if completion.stopped else wire.STOP_REASON_LENGTH
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.float().numpy().tobytes()
    body: bytes = message.SerializeToString()
    return body


Kind = Literal["weights", "sampler_weights"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
_ADDRESS = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
_ABOUT = "tinker.json"


@dataclass(frozen=True)
class AdapterShape:
    """The adapters of a model."""

    rank: int
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class WeightFolders:
    """The folders of saved weights under ``root``."""

    root: Path

    def new(self, model: str, kind: Kind, name: str, shape: AdapterShape, *, overwrite: bool = False) -> tuple[str, Path]:
        """Make a folder. Return its address and itself. Raises TinkerRequestError for a name that is taken or cannot be one of a folder."""
        folder = self._folder(model, kind, name)
        if folder.exists() and not overwrite:
            raise TinkerRequestError(f"there are {kind} named {name!r} already; use another name, or overwrite=True")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ABOUT).write_text(json.dumps(asdict(shape)))
        return f"tinker://{model}/{kind}/{name}", folder

    def find(self, address: str) -> tuple[Path, AdapterShape]:
        """Return the folder of an address. Raises TinkerRequestError if nothing is saved there."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise TinkerRequestError(
                f"{address!r} is no address of weights: tinker://MODEL/weights/NAME or .../sampler_weights/NAME"
            )
        folder = self._folder(match[1], match[2], match[3])
        if not (folder / _ABOUT).is_file():
            raise TinkerRequestError(f"nothing is saved as {address}")
        return folder, AdapterShape(**json.loads((folder / _ABOUT).read_text()))

    def _folder(self, *names: str) -> Path:
        for name in names:
            if not _NAME.fullmatch(name):
                raise TinkerRequestError(
                    f"{name!r} cannot be the name of weights: use letters, digits, dots, dashes and underscores"
                )
        return self.root.joinpath(*names)

"""The messages of the Tinker SDK that are protobuf. Their classes are those of the package ``tinker``; everything else is JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor

from strop.extensions.tinker.datum_batch import ForwardBackwardCall, TinkerRequestError, TrainingDatum
from strop.generation.base import Completion

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

"""What the unfinished groups of a run have sampled so far, so that a resumed run makes them again without sampling it anew.

Their episodes begin again, and environments are asked the same questions; the engine's part is read from here. It is JSON: ids as they
are, log-probabilities to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.generation.base import Completion


@dataclass(frozen=True)
class JournalEntry:
    """A completion, and the tick at which the engine had finished it."""

    tick: int
    completion: Completion


@dataclass
class GroupJournal:
    """An unfinished group: when and by which weights it began, and its completions so far."""

    version: int
    begun: int  # tick
    scoring: int | None = None  # the tick from which the rewards of the whole group are computed
    samples: dict[int, list[JournalEntry]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # samples whose rollouts have ended

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "begun": self.begun,
            "scoring": self.scoring,
            "ended": sorted(self.ended),
            "samples": {
                str(sample): [{"tick": entry.tick, **_encode(entry.completion)} for entry in entries]
                for sample, entries in self.samples.items()
            },
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> GroupJournal:
        samples = {
            int(sample): [JournalEntry(entry["tick"], _decode(entry)) for entry in entries]
            for sample, entries in values["samples"].items()
        }
        return GroupJournal(values["version"], values["begun"], values["scoring"], samples, set(values["ended"]))


# The tensors of a completion and their types: [L], [L, K] or [P + L - 1, layers, k].
_TENSORS = {
    "tokens": torch.int64,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "entropies": torch.float32,
    "kept": torch.int32,
}


def _encode(completion: Completion) -> dict[str, Any]:
    values: dict[str, Any] = {"text": completion.text, "stopped": completion.stopped}
    for name in _TENSORS:
        tensor: Tensor | None = getattr(completion, name)
        values[name] = None if tensor is None else tensor.tolist()
    if completion.routes is not None:
        values["routes"] = {"dtype": str(completion.routes.dtype).removeprefix("torch."), "values": completion.routes.tolist()}
    return values


def _decode(values: Mapping[str, Any]) -> Completion:
    tensors = {
        name: None if values[name] is None else torch.tensor(values[name], dtype=dtype) for name, dtype in _TENSORS.items()
    }
    if (routes := values.get("routes")) is not None:
        tensors["routes"] = torch.tensor(routes["values"], dtype=getattr(torch, routes["dtype"]))
    return Completion(text=values["text"], stopped=values["stopped"], **tensors)  # type: ignore[arg-type]

"""Recorded data scored outside of training steps: by the reference, once before training and stored, and held-out data by the loss.

An example is identified by the name of its data, its task id, its rollout number and a fingerprint of its tokens: an example
that has changed since then raises an error. The file also records the weights used.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.data.packing import pack
from strop.learner.base import require_token_outputs
from strop.learner.client import ColumnSources, LearnerClient, ScorerClient
from strop.monitoring.trackers.base import Tracker
from strop.storage.files import atomic_write
from strop.types import Batch, Group, Rollout

GROUPS_PER_PACK = 64  # groups packed together: enough to fill the micro-batches


@dataclass(frozen=True, eq=False)
class ReferenceStore:
    """Log-probabilities of recorded rollouts by their identity. A ``ColumnSource`` for the column ``reference_logprobs``."""

    path: Path
    logprobs: Tensor  # float32, of all rollouts, concatenated
    spans: Mapping[tuple[int, int], tuple[int, int]]  # (hash of name, fingerprint) of a rollout -> [start, end)

    def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Return the column of the batch, [N] float32. Raises LookupError for an example that is missing or has changed."""
        parts = [self._lookup(group, rollout) for group in groups for rollout in group.rollouts]
        column = torch.cat(parts) if parts else torch.zeros(0)
        if len(column) != len(batch.target):
            raise ValueError(
                f"the batch predicts {len(batch.target)} tokens, and its groups have {len(column)} loss tokens: reference "
                "log-probabilities need a batch that predicts each of them"
            )
        return {REFERENCE_LOGPROBS: column}

    def _lookup(self, group: Group, rollout: Rollout) -> Tensor:
        name = _rollout_name(group, rollout)
        span = self.spans.get((_hash(name), rollout_fingerprint(rollout)))
        if span is None:
            known = any(key == _hash(name) for key, _ in self.spans)
            reason = "has other tokens than when" if known else "was not among the examples when"
            raise LookupError(
                f"{name} {reason} the reference log-probabilities in {self.path} were computed: the data, the tokenizer or the reading "
                "options have changed. Remove that file to compute them again"
            )
        return self.logprobs[slice(*span)]


async def load_or_compute_reference(
    path: Path,
    groups: Callable[[], Iterable[Group]],
    scorer: ScorerClient,
    algorithm: Algorithm,
    *,
    weights: str,
    data: str,
    share_prefixes: bool = True,
) -> ReferenceStore:
    """Load the store at ``path``; if the file does not exist, score every rollout of ``groups`` and write it.

    ``groups`` is called only in the second case; groups with errors are skipped. Call this while the scorer has the initial weights of
    training, before a checkpoint is loaded. ``weights`` (see ``model_fingerprint``) and ``data``, a description of the examples'
    source and how they are read, must match those of the file. Raises ValueError otherwise. An interrupted call leaves no file.
    """
    provenance = {"weights": weights, "data": data}
    if path.exists():
        return _read(path, provenance)
    columns: list[Tensor] = []
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    end = 0
    for chunk in _chunks((group for group in groups() if not group.errors), GROUPS_PER_PACK):
        batch = pack(chunk, algorithm.group_credit(chunk), share_prefixes=share_prefixes)
        logprobs = require_token_outputs(await scorer.score(batch)).logprobs
        rollouts = ((group, rollout) for group in chunk for rollout in group.rollouts)
        for (group, rollout), values in zip(rollouts, batch.split(logprobs), strict=True):
            if (key := (_hash(_rollout_name(group, rollout)), rollout_fingerprint(rollout))) not in spans:
                spans[key] = (end, end + len(values))
                columns.append(values)
                end += len(values)
    store = ReferenceStore(path, torch.cat(columns) if columns else torch.zeros(0), spans)
    _write(store, provenance)
    return store


def rollout_fingerprint(rollout: Rollout) -> int:
    """Return a 64-bit hash of a rollout's tokens, its loss mask, and its images."""
    digest = hashlib.blake2b(digest_size=8)
    for author, tokens in (("prompt", rollout.prompt), *((turn.author, turn.tokens) for turn in rollout.turns)):
        digest.update(f"{author} {len(tokens)} ".encode())
        digest.update(tokens.to(torch.int64).numpy().tobytes())
    for image in rollout.path_images:
        digest.update(image.digest.encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _rollout_name(group: Group, rollout: Rollout) -> str:
    return f"rollout {rollout.sample} of {rollout.task.id} in {group.environment}"


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _chunks(groups: Iterable[Group], size: int) -> Iterator[list[Group]]:
    remaining = iter(groups)
    while chunk := list(islice(remaining, size)):
        yield chunk


def _write(store: ReferenceStore, provenance: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    keys = torch.tensor(list(store.spans), dtype=torch.int64).reshape(-1, 2)
    lengths = torch.tensor([last - first for first, last in store.spans.values()], dtype=torch.int64)
    with atomic_write(store.path) as draft:
        save_file({"logprobs": store.logprobs, "keys": keys, "lengths": lengths}, draft, metadata=dict(provenance))


def _read(path: Path, provenance: Mapping[str, str]) -> ReferenceStore:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        stored: dict[str, Any] = dict(file.metadata() or {})
        logprobs, keys, lengths = (file.get_tensor(name) for name in ("logprobs", "keys", "lengths"))
    differing = [
        f"{name} (then {stored.get(name)!r}, now {value!r})" for name, value in provenance.items() if stored.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"the reference log-probabilities in {path} were computed with other {' and '.join(differing)}; remove that file to compute "
            "them again, or set another one"
        )
    ends = lengths.cumsum(0).tolist()
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return ReferenceStore(
        path, logprobs, {(name, tokens): span for (name, tokens), span in zip(keys.tolist(), spans, strict=True)}
    )


@dataclass(kw_only=True)
class LossValidator:
    """Computes the algorithm's loss and metrics on fixed groups, as means over all of them, independent of the micro-batches.

    The groups are packed once and the required columns are computed once, so the models that compute them must be frozen, such as a
    reference policy. Groups with errors are left out and counted. Raises ValueError if no group is left.
    """

    groups: Sequence[Group]
    algorithm: Algorithm
    learner: LearnerClient
    columns: ColumnSources
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        self.usable_groups = [group for group in self.groups if not group.errors]
        self._batch: Batch | None = None
        if not self.usable_groups:
            reasons = [error for group in self.groups for error in group.errors]
            raise ValueError(
                f"none of the {len(self.groups)} validation examples can be used{': ' + reasons[0] if reasons else ''}; set "
                "data.validation to other data, or to null"
            )

    async def evaluate(self, step: int, tracker: Tracker | None = None) -> dict[str, float]:
        """Return metrics under ``validation/``: those of the loss, and the number of examples used and left out."""
        started = time.perf_counter()
        if tracker is not None:
            tracker.progress(f"validating on {len(self.usable_groups)} examples")
        batch = await self._prepare_step(await self._prepare_batch())
        result = await self.learner.evaluate_loss(batch, self.algorithm.losses(step)["policy"])
        logged = {
            **metrics.to_floats(result.metrics),
            "examples": float(len(self.usable_groups)),
            "examples_left_out": float(len(self.groups) - len(self.usable_groups)),
            "seconds": time.perf_counter() - started,
        }
        return {f"validation/{name}": value for name, value in logged.items()}

    async def _prepare_batch(self) -> Batch:
        """Pack the groups, with columns and credit; done once, at the first call."""
        if self._batch is None:
            batch = pack(self.usable_groups, self.algorithm.group_credit(self.usable_groups), share_prefixes=self.share_prefixes)
            self._batch = self.algorithm.token_credit(await self.columns.fill(batch, self.usable_groups))
        return self._batch

    async def _prepare_step(self, batch: Batch) -> Batch:
        """Add the columns that depend on the current weights."""
        outputs = require_token_outputs(await self.learner.score(batch)) if self.algorithm.needs_step_outputs else None
        return self.algorithm.prepare_step(batch, outputs)

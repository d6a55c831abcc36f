"""Verification that an engine holds the weights sent by the learner: version, fingerprints and canary (law 4).

Three independent checks:

- Did every byte arrive? Both ends compute the fingerprint of each tensor, as sent and as it arrives.
- Does the engine use it? Its weights are read back from its own layout, under canonical names.
- Does the engine agree with the learner? It samples a few tokens, and the learner's log-probabilities of them are compared
  (``strop.weight_sync.canary``). This covers weights that cannot be read back, and other faults (adapters that are not applied,
  prefix caches of older weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from strop.weight_sync.base import LoadReceipt, Manifest, TensorFingerprint
from strop.weight_sync.fingerprints import combine_fingerprints
from strop.weight_sync.weight_sync_config import WeightSyncConfig


class VerificationFailed(RuntimeError):
    """An engine does not hold the published weights; the message names the tensor, or the stale part."""


def is_verification_due(config: WeightSyncConfig, publishes: int) -> bool:
    """Whether the expensive checks (read-back and canary) are due, given the number of earlier publishes.

    The arrived weights are compared at every publish."""
    return config.proof == "always" or publishes == 0 or (config.proof == "every_n" and publishes % config.proof_every == 0)


def verify_version(name: str, receipt: LoadReceipt, version: int) -> None:
    if receipt.version != version:
        raise VerificationFailed(
            f"{name} was sent weights of version {version}, but reports that it holds version {receipt.version}"
        )


def verify_complete(manifest: Manifest, sent: Mapping[str, int]) -> None:
    """Raises VerificationFailed unless the ranks sent every tensor of the publish."""
    missing = [name for name in manifest.names if name not in sent]
    if missing:
        raise VerificationFailed(
            f"no rank has sent {', '.join(missing[:3])}: the ranks have sent {len(sent)} of the {len(manifest.names)} tensors of the "
            "publish, so the engines' weights are those of several versions"
        )


def verify_arrival(name: str, sent: Mapping[str, int], receipt: LoadReceipt) -> None:
    """Raises VerificationFailed unless every process of the engine received every tensor as it was sent."""
    for tensor, expected in sent.items():
        arrived = receipt.fingerprints.get(tensor, ())
        if not arrived:
            raise VerificationFailed(f"{name} did not load {tensor}, which was sent")
        for process, value in enumerate(arrived):
            if value != expected:
                raise VerificationFailed(
                    f"{name}: {tensor} did not arrive as it was sent, in its process {process}{_describe_origin(value, sent)}"
                )


@dataclass(frozen=True)
class ReadBackReport:
    """The verified part of a publish, by read-back."""

    verified: int  # number of tensors
    unread: tuple[str, ...]  # tensors that cannot be read back; verified only by their arrival and the canary


def verify_fingerprints(
    name: str,
    sent: Mapping[str, int],
    aliases: Mapping[str, str],
    held: Mapping[str, tuple[TensorFingerprint, ...]],
    *,
    experts: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> ReadBackReport:
    """Verify that the weights in use by the engine are those that were sent.

    ``sent`` are the fingerprints of the sent tensors with -0.0 replaced by 0.0. ``aliases`` maps the names of tied tensors to the
    names that they were sent under. ``experts`` are the fingerprints of each expert of tensors that hold several, so that an
    error can name the wrong one. Raises VerificationFailed.
    """
    verified: set[str] = set()
    for tensor, shards in held.items():
        source = aliases.get(tensor, tensor)
        if source not in sent:
            continue
        combined = combine_fingerprints({shard.region: shard.value for shard in shards}.values())
        if not _replicas_agree(shards) or combined != sent[source]:
            found = f"{_find_expert(shards, experts.get(source, ()))}{tensor}"
            tied = f" (tied to {source})" if source != tensor else ""
            raise VerificationFailed(
                f"{name} does not compute with the {found}{tied} that was sent{_describe_origin(combined, sent)}: "
                "the update did not reach the layer, or its processes differ"
            )
        verified.add(source)
    return ReadBackReport(len(verified), tuple(sorted(sent.keys() - verified)))


def combine_regions(shards: Sequence[TensorFingerprint]) -> tuple[int, ...]:
    """Combine the fingerprints of a tensor's regions into one. If replicas of a region differ, return one fingerprint per process."""
    if not _replicas_agree(shards):
        return tuple(shard.value for shard in shards)
    return (combine_fingerprints(shard.value for shard in set(shards)),)


def _replicas_agree(shards: Sequence[TensorFingerprint]) -> bool:
    """Whether all processes that hold the same region have the same fingerprint."""
    return len({shard.region for shard in shards}) == len(set(shards))


def _find_expert(shards: Sequence[TensorFingerprint], sent: Sequence[int]) -> str:
    """Name the expert of a tensor that differs from the sent one, for a message; empty for other tensors."""
    for expert, expected in enumerate(sent):
        own = {shard.region: shard for shard in shards if shard.region[0] == expert}
        agree = _replicas_agree([shard for shard in shards if shard.region[0] == expert])
        if not agree or combine_fingerprints(shard.value for shard in own.values()) != expected:
            return f"expert {expert} of "
    return ""


def _describe_origin(value: int, sent: Mapping[str, int]) -> str:
    others = [name for name, expected in sent.items() if expected == value]
    return f"; it has the values of {others[0]}" if others else ""

"""Verification that an engine holds the weights sent by the learner: version, fingerprints, and a canary that samples a few tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType

import torch
from torch import Tensor

from strop.data.packing import pack
from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling, mix_seed
from strop.types import Batch, Group, Rollout, Task, Turn, user
from strop.weight_sync.base import CanarySample, LoadReceipt, Manifest, TensorFingerprint, UpdatableEngine
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


ComputeLogprobs = Callable[[Batch], Awaitable[Tensor]]
"""Return the learner's log-probabilities [N] of the tokens of a batch."""

ScoreSamples = Callable[[Sequence[Sequence[int]], Sequence[CanarySample]], Awaitable[Sequence[Tensor]]]
"""Return the learner's log-probabilities [L] of each sample, given its prompt."""

CANARY_TOKENS = 16  # tokens sampled per canary prompt
# Mean difference in nats, by precision; a tied head that was not updated differs by 0.1 to 10.
CANARY_TOLERANCE = {"float32": 0.002, "bfloat16": 0.1}
# The same for engines with low-precision weights, by the number of fraction bits: FP8 (E4M3) and FP4 (docs/fp8.md).
ROUNDED_TOLERANCE = {"fp8": 0.3, "mxfp8": 0.3, "nvfp4": 0.8}
CANARY_TEXTS = (
    "A farmer has 17 sheep, 23 goats and 4 dogs. On Monday she sells 5 of the sheep and buys 9 goats. On Tuesday two of the dogs run away, "
    "and one comes back on Wednesday with a kitten. How many animals are on the farm then? Explain every step, then answer.",
    "Write a function in Python that takes a list of integers and returns the length of its longest strictly increasing run of neighbours. "
    "Say what it returns for [], for [3] and for [1, 2, 2, 3, 4], and why it takes a time that is linear in the length of the list.",
)


@dataclass(frozen=True)
class CanaryReport:
    mean: float  # absolute difference of log-probabilities, in nats
    largest: float
    tokens: int


@dataclass(frozen=True)
class Canary:
    """A few fixed prompts on which the log-probabilities of engine and learner are compared."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    score: ScoreSamples
    tolerance: float  # maximum mean absolute difference, in nats
    seed: int = 0

    async def check(self, engine: UpdatableEngine) -> CanaryReport:
        """Sample every prompt and compare log-probabilities with the learner's. Raises VerificationFailed.

        The prompts are the same after every publish, so a hit in the prefix cache means that keys and values of older weights
        were kept, except for the beginning that the chat template gives all prompts: an earlier prompt computed it with the new
        weights.
        """
        samples: list[CanarySample] = []
        for index, prompt in enumerate(self.prompts):
            sample = await engine.sample_canary(prompt, sampling=self.sampling, seed=mix_seed(self.seed, index))
            if sample.cached > max((count_shared(prompt, other) for other in self.prompts[:index]), default=0):
                raise VerificationFailed(
                    f"{engine.name} found {sample.cached} tokens of a prompt in its prefix cache right after a weight update: they were "
                    "computed with older weights"
                )
            samples.append(sample)
        learner_logprobs = await self.score(self.prompts, samples)
        differences = torch.cat(
            [(logprobs - other.logprobs).abs() for logprobs, other in zip(learner_logprobs, samples, strict=True)]
        )
        report = CanaryReport(float(differences.mean()), float(differences.max()), len(differences))
        if not report.mean <= self.tolerance:
            raise VerificationFailed(
                f"{engine.name} and the learner disagree on the canary's {report.tokens} tokens by {report.mean:.4g} nats on average "
                f"(largest {report.largest:.4g}), and {self.tolerance:g} is allowed (policy.generation.weight_sync.canary_tolerance): the "
                "engine does not sample from the trained policy. A tensor that cannot be read back may be stale, an adapter may not be "
                "applied, or the two compute the model differently; set policy.generation.vllm_cfg.precision=float32 to rule out "
                "rounding"
            )
        return report


def count_shared(prompt: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other, strict=False)))


def make_canary(
    template: ChatTemplate,
    config: WeightSyncConfig,
    sampling: Sampling,
    compute_logprobs: ComputeLogprobs,
    *,
    precision: str,
    max_length: int,
    share_prefixes: bool,
    seed: int,
    weight_format: str | None = None,
) -> Canary:
    """Make the canary of a run.

    Args:
        template: Makes the prompts.
        config: Sets the tolerance.
        sampling: Of the run's rollouts.
        compute_logprobs: Computes the learner's log-probabilities of a batch.
        precision: Of the engines' weights.
        max_length: The longest sequence of the engines, in tokens.
        share_prefixes: Whether prompts are shared in training batches.
        seed: Of the samples.
        weight_format: Number format of the engines' weights; None: they are the learner's.
    """
    tolerance = CANARY_TOLERANCE[precision]
    if weight_format is not None:  # the canary compares with the learner, whose weights are not rounded
        tolerance = ROUNDED_TOLERANCE[weight_format.partition("_")[0]]
    return Canary(
        prompts=make_canary_prompts(template, max(1, max_length - CANARY_TOKENS)),
        sampling=replace(sampling, max_new_tokens=CANARY_TOKENS, stop_token_ids=(), stop_strings=(), entropy=False),
        score=make_canary_scorer(compute_logprobs, share_prefixes=share_prefixes),
        tolerance=config.canary_tolerance or tolerance,
        seed=seed,
    )


def make_canary_prompts(template: ChatTemplate, max_length: int) -> tuple[tuple[int, ...], ...]:
    """Return prompts of at most ``max_length`` tokens each, if possible long enough to fill blocks of a prefix cache."""
    return tuple(tuple(template.encode_prompt([user(text)])[-max_length:]) for text in CANARY_TEXTS)


def make_canary_scorer(compute_logprobs: ComputeLogprobs, *, share_prefixes: bool) -> ScoreSamples:
    """Return a function that scores canary samples with the learner, through the same path as a training batch."""

    async def score(prompts: Sequence[Sequence[int]], samples: Sequence[CanarySample]) -> list[Tensor]:
        groups = [_to_group(index, *pair) for index, pair in enumerate(zip(prompts, samples, strict=True))]
        batch = pack(groups, share_prefixes=share_prefixes)
        return list(batch.split((await compute_logprobs(batch)).float().cpu()))

    return score


def _to_group(index: int, prompt: Iterable[int], sample: CanarySample) -> Group:
    turn = Turn(
        author="policy",
        tokens=sample.tokens,
        text="",
        logprobs=sample.logprobs,
        versions=torch.zeros(len(sample.tokens), dtype=torch.int32),
        # Its own tokens are scored as they were sampled; what it read is read as the learner does.
        columns={column: values for column, values in sample.columns.items() if column.aligned != "read"},
    )
    rollout = Rollout(
        task=Task(id=f"canary {index}"), sample=0, seed=0, messages=(), prompt=torch.tensor(list(prompt)), turns=(turn,)
    )
    return Group(index=-1 - index, environment="canary", version=0, rollouts=(rollout,))

"""The proof that an engine holds what the learner sent: version, fingerprints, canary (law 4).

Three questions, each of which the others cannot answer:

- Did every byte arrive? Both ends take the fingerprint of each tensor as it is sent and as it arrives.
- Does the engine compute with it? What it holds is read back out of its own layout under canonical names.
- Does it then say what the learner says? A few tokens are sampled and the learner's log-probabilities of them compared: that covers what
  cannot be read back, and everything beside weights (adapters that are not applied, caches of other weights).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strop.sampling import Sampling, mix_seed
from strop.weights.base import Answer, Held, Receipt, WeightHolder
from strop.weights.fingerprints import combine


class ProofFailed(RuntimeError):
    """An engine does not hold the weights that were published; the message names the tensor, or what else is stale."""


@dataclass(frozen=True)
class ProofSchedule:
    """When the costly questions are asked; what arrived is compared every time."""

    mode: Literal["always", "first", "every_n"] = "every_n"
    every: int = 10

    def due(self, publishes: int) -> bool:
        """``publishes`` went before this one."""
        return self.mode == "always" or publishes == 0 or (self.mode == "every_n" and publishes % self.every == 0)


def prove_version(name: str, receipt: Receipt, version: int) -> None:
    if receipt.version != version:
        raise ProofFailed(f"{name} was sent weights of version {version}, and says that it holds version {receipt.version}")


def prove_arrival(name: str, sent: Mapping[str, int], receipt: Receipt) -> None:
    """Every process of the engine took every tensor as it was sent."""
    for tensor, mark in sent.items():
        arrived = receipt.received.get(tensor, ())
        if not arrived:
            raise ProofFailed(f"{name} did not take {tensor}, which was sent")
        for place, found in enumerate(arrived):
            if found != mark:
                raise ProofFailed(f"{name}: {tensor} did not arrive as it was sent, in its process {place}{_whose(found, sent)}")


@dataclass(frozen=True)
class ReadBack:
    """How much of a publish was proven by reading it back."""

    proven: int
    unread: tuple[str, ...]  # tensors that the engine cannot give back: their proof is their arrival, and the canary


def prove_held(name: str, sent: Mapping[str, int], aliases: Mapping[str, str], held: Mapping[str, tuple[Held, ...]]) -> ReadBack:
    """What the engine computes with is what was sent. ``sent`` are fingerprints of the tensors with their zeros made positive, ``aliases``
    names of tied tensors -> the name under which they were sent."""
    proven: set[str] = set()
    for tensor, parts in held.items():
        source = aliases.get(tensor, tensor)
        if source not in sent:
            continue
        whole = combine({part.region: part.fingerprint for part in parts}.values())
        if not _alike(parts) or whole != sent[source]:
            tied = f" (tied to {source})" if source != tensor else ""
            raise ProofFailed(
                f"{name} does not compute with the {tensor}{tied} that was sent{_whose(whole, sent)}: the update did not reach the "
                "layer, or its processes differ"
            )
        proven.add(source)
    return ReadBack(len(proven), tuple(sorted(sent.keys() - proven)))


def _alike(parts: Sequence[Held]) -> bool:
    """Processes that hold the same region hold the same."""
    return len({part.region for part in parts}) == len(set(parts))


def _whose(found: int, sent: Mapping[str, int]) -> str:
    others = [name for name, mark in sent.items() if mark == found]
    return f"; it has the values of {others[0]}" if others else ""


Score = Callable[[Sequence[Sequence[int]], Sequence[Answer]], Awaitable[Sequence[Tensor]]]
"""The learner's log-probabilities [L] of each answer to its prompt."""


@dataclass(frozen=True)
class CanaryReport:
    mean: float  # of the absolute differences of log-probabilities, in nats
    largest: float
    tokens: int


@dataclass(frozen=True)
class Canary:
    """A few prompts whose sampled tokens engine and learner must agree on."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    score: Score
    tolerance: float  # of the mean difference, in nats
    seed: int = 0

    async def ask(self, engine: WeightHolder) -> CanaryReport:
        """Each prompt was asked after earlier publishes too: had the engine kept keys and values of those weights, it would find them in
        its prefix cache now. Raises ProofFailed."""
        answers = []
        for place, prompt in enumerate(self.prompts):
            answer = await engine.ask(prompt, sampling=self.sampling, seed=mix_seed(self.seed, place))
            if answer.cached:
                raise ProofFailed(
                    f"{engine.name} found {answer.cached} tokens of a prompt in its prefix cache right after new weights: they were "
                    "computed by the weights before"
                )
            answers.append(answer)
        learner = await self.score(self.prompts, answers)
        differences = torch.cat([(mine - its.logprobs).abs() for mine, its in zip(learner, answers, strict=True)])
        report = CanaryReport(float(differences.mean()), float(differences.max()), len(differences))
        if not report.mean <= self.tolerance:
            raise ProofFailed(
                f"{engine.name} and the learner disagree on the canary's {report.tokens} tokens by {report.mean:.4g} nats in the mean "
                f"(largest {report.largest:.4g}), and {self.tolerance:g} is allowed (policy.generation.weight_sync.canary_tolerance): "
                "the engine samples from another distribution than the one that is trained. A tensor that it cannot give back may be "
                "stale, an adapter may not be applied, or the two compute the model differently; policy.generation.vllm_cfg.precision="
                "float32 tells rounding from the rest"
            )
        return report

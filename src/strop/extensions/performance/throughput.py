"""Training speed per device: tokens per second, and the share of its peak arithmetic (MFU)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from strop.extensions.performance.devices import DecoderDimensions, PassCounts, forward_flops, training_flops, windows_of
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class TrainingPasses:
    """The passes of an update over its batch."""

    epochs: int = 1  # forward and backward passes over it
    scored_before: bool = False  # an additional earlier pass without gradient
    zero_gradient: Tensor | None = None  # [S] bool: rollouts without a backward pass

    def gradient_share(self, batch: Batch) -> float:
        """Return the share of the predicted tokens that have a gradient."""
        if self.zero_gradient is None or not len(batch.sequence):
            return 1.0
        return 1.0 - float(self.zero_gradient[batch.sequence].double().mean())


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The quantities that rates are divided by. Only the policy's arithmetic counts, so the time of a critic lowers the MFU."""

    devices: int  # of the run: for training and generation
    training_devices: int
    model: DecoderDimensions | None = None  # None: its layers are unknown
    peak_flops: float | None = None  # of one device, FLOPs per second; None: unknown
    frozen: bool = False  # the weights have no gradients (LoRA)

    def metrics(self, batch: Batch, passes: TrainingPasses, timing: Mapping[str, float]) -> dict[str, float]:
        """Return ``perf/...`` of a step, from its batch and its ``timing/`` and ``performance/`` metrics."""
        found = {"perf/tokens_per_sec_per_gpu": timing["performance/tokens_per_sec"] / self.devices}
        seconds = timing.get("timing/train/policy_training", 0.0)
        if self.model is None or seconds <= 0:
            return found
        rate = self.count_flops(batch, passes) / seconds / self.training_devices
        found["perf/model_tflops_per_gpu"] = rate / 1e12
        if self.peak_flops is not None:
            found["perf/mfu"] = rate / self.peak_flops
        return found

    def count_flops(self, batch: Batch, passes: TrainingPasses) -> float:
        """Count the FLOPs of an update: tokens without a gradient only have a forward pass, and shared prompts are read once."""
        assert self.model is not None
        counts = count_batch(batch, self.model)
        forward = forward_flops(self.model, counts)
        trained = training_flops(self.model, counts, frozen=self.frozen)
        share = passes.gradient_share(batch)
        return passes.epochs * (share * trained + (1 - share) * forward) + (forward if passes.scored_before else 0.0)


def count_batch(batch: Batch, model: DecoderDimensions) -> PassCounts:
    """Count what a pass over a packed batch reads. A token attends to itself and all tokens before it on its path: position + 1."""
    seen = batch.positions + 1
    pairs = {window: int((seen if window is None else seen.clamp(max=window)).sum()) for window in windows_of(model)}
    return PassCounts(read=len(batch.tokens), predicted=len(batch.target), pairs=pairs)

"""By how much a replay may differ from what was logged where two equal passes differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from strop.extensions.replay import replayed_step
from strop.extensions.replay.replayed_step import EqualPasses, compare_metrics, compare_passes, passes_may_differ

FIRST = {"loss": 0.5, "grad_norm": 1.50, "entropy": 2.0, "reward": 1.0}
SECOND = {"loss": 0.5001, "grad_norm": 1.53, "entropy": 2.0, "reward": 1.0}


def unexplained(**logged: float) -> list[str]:
    return compare_passes(3, FIRST, SECOND).unexplained(compare_metrics(3, {**FIRST, **logged}, FIRST))


def test_a_metric_may_differ_as_equal_passes_do_and_no_more() -> None:
    assert compare_passes(3, FIRST, SECOND).different == {"loss": (0.5, 0.5001), "grad_norm": (1.5, 1.53)}
    assert unexplained() == []
    assert unexplained(loss=0.4998, grad_norm=1.62) == []
    assert unexplained(grad_norm=3.9) == ["grad_norm"]
    assert unexplained(entropy=2.01) == [], "that the passes have it in common may be chance"
    assert unexplained(entropy=2.9, reward=0.0) == ["entropy", "reward"]
    assert unexplained(grad_norm=float("nan")) == ["grad_norm"]


def test_where_passes_are_equal_every_difference_counts() -> None:
    passes = EqualPasses(compared=4, different={})
    assert passes.unexplained(compare_metrics(3, {**FIRST, "loss": 0.5000001}, FIRST)) == ["loss"]


def test_equal_passes_differ_on_gpus_alone_and_not_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_step, "resolve_device", torch.device)

    def may_differ(device: str, *, deterministic: bool) -> bool:
        policy = SimpleNamespace(device=device, deterministic=deterministic)
        return passes_may_differ(SimpleNamespace(policy=policy))  # type: ignore[arg-type]

    assert may_differ("cuda", deterministic=False) and may_differ("cuda:1", deterministic=False)
    assert not may_differ("cuda", deterministic=True) and not may_differ("cpu", deterministic=False)

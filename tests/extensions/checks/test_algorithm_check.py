"""``strop algorithm check`` finds what is wrong with an algorithm, and nothing with Strop's own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from strop import metrics
from strop.algorithm_factory import all_algorithms, make_algorithm
from strop.algorithms.base import Algorithm
from strop.algorithms.functional import aggregate
from strop.algorithms.policy_gradient.grpo import GRPO, Clip
from strop.extensions.checks.algorithm_check import check_algorithm, trace_formula
from strop.extensions.checks.algorithm_command import algorithm as run_command
from strop.extensions.recorded.preference.referenced import DPO
from strop.types import Batch, Group
from support.sweep import one_in

NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant_length": 7},
    "gdpo": {"advantage": {"weights": {"first": 1.0, "second": 0.3}}},
}


@pytest.mark.parametrize("name", one_in(16, sorted(all_algorithms())))
def test_no_algorithm_of_the_catalogue_has_a_fault(name: str) -> None:
    report = check_algorithm(name, make_algorithm(name, NEEDED.get(name, {})))
    assert report.faults == []
    assert report.made == {"options", "credit", "inputs", "loss", "cuts", "zero_gradient", "metrics", "terms"}


@dataclass(frozen=True, kw_only=True)
class MeanOverTheMicroBatch(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        value = -(outputs.logprobs * batch.advantages).mean()
        return value, {"loss": metrics.total(value.item())}

    def loss_terms(self, outputs: Any, batch: Batch, learner: str = "policy") -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class ExtraTermWithoutItsZeroGradient(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        loss, logged = super().loss(outputs, batch)
        return loss - 0.1 * aggregate(outputs.logprobs, batch), logged


@dataclass(frozen=True, kw_only=True)
class UnboundedDivisor(GRPO):
    def advantages(self, group: Group) -> Any:
        return (group.rewards - group.rewards.mean()) / group.rewards.std(correction=0)


@dataclass(frozen=True, kw_only=True)
class OneCreditForTheGroup(GRPO):
    def advantages(self, group: Group) -> Any:
        return group.rewards.mean(0, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class UnboundedExponent(Clip):
    def __call__(self, tokens: Any) -> Any:
        return torch.exp(40 * (tokens.logprobs - tokens.old_logprobs)).square() * tokens.advantages, {}


@dataclass(frozen=True, kw_only=True)
class DetachedRatio(Clip):
    def __call__(self, tokens: Any) -> Any:
        return tokens.ratio.detach() * tokens.advantages, {}


@dataclass(frozen=True, kw_only=True)
class ChangesItsBatch(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        batch.advantages.mul_(0.5)
        return super().loss(outputs, batch)


@dataclass(frozen=True, kw_only=True)
class RemembersItsCalls(GRPO):
    calls: ClassVar[list[int]] = []

    def loss(self, outputs: Any, batch: Batch) -> Any:
        self.calls.append(1)
        loss, logged = super().loss(outputs, batch)
        return loss * len(self.calls), logged


@dataclass(frozen=True, kw_only=True)
class MeanMetricAsATotal(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        loss, logged = super().loss(outputs, batch)
        return loss, {**logged, "entropy": metrics.total(outputs.entropy.mean().item())}


@dataclass(frozen=True, kw_only=True)
class LossPerToken(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        return -outputs.logprobs * batch.advantages, {}


@dataclass(frozen=True, kw_only=True)
class MutableOption(GRPO):
    seen: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class NoPairsKeptTogether(DPO):
    whole_groups: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Raises(GRPO):
    def advantages(self, group: Group) -> Any:
        return group.rewards / len(group.missing)  # type: ignore[attr-defined]


MISTAKES: dict[str, tuple[Algorithm, str, str]] = {
    "mean": (MeanOverTheMicroBatch(), "cuts", "in two halves"),
    "zero_gradient": (ExtraTermWithoutItsZeroGradient(), "zero_gradient", "Define zero_gradient(batch, learner)"),
    "divisor": (UnboundedDivisor(), "credit", "advantages returned [nan, nan, nan] for rewards [1.0, 1.0, 1.0]"),
    "shape": (
        OneCreditForTheGroup(),
        "credit",
        "a tensor of shape (1,) for a group of 4 rollouts; return one value for each, [4]",
    ),
    "exponent": (GRPO(objective=UnboundedExponent()), "loss", "gradients are not finite"),
    "detached": (GRPO(objective=DetachedRatio()), "loss", "has no gradient: nothing would be learned"),
    "in_place": (ChangesItsBatch(), "inputs", "the loss changed advantages in place"),
    "state": (RemembersItsCalls(), "inputs", "and called again"),
    "metric": (MeanMetricAsATotal(), "metrics", "entropy is "),
    "per_token": (LossPerToken(), "loss", "return one number: aggregate(values, batch)"),
    "mutable": (MutableOption(), "options", "seen is a list, which can change between two calls"),
    "nan": (replace(GRPO(), constant_length=math.nan), "options", "constant_length is NaN"),
    "pairs": (NoPairsKeptTogether(), "cuts", "a learner must not split a group (whole_groups)"),
    "raises": (Raises(), "credit", "AttributeError: 'Group' object has no attribute 'missing'"),
}


@pytest.mark.parametrize("planted", MISTAKES)
def test_a_planted_mistake_is_named_with_what_to_do(planted: str) -> None:
    algorithm, check, words = MISTAKES[planted]
    report = check_algorithm(planted, algorithm)
    assert [fault for fault in report.faults if fault.check == check and words in fault.message], report.faults


def curves_of(name: str, **options: Any) -> dict[str, dict[float, tuple[float, float]]]:
    curves = trace_formula(make_algorithm(name, options)).curves
    return {label: {point.at: (point.objective, point.gradient) for point in points} for label, points in curves.items()}


def test_the_formula_of_ppos_clip_is_the_papers() -> None:
    curves = curves_of("grpo", objective={"low": 0.2, "high": 0.28})
    for ratio in (0.5, 0.9, 1.0, 1.25, 2.0):
        up, down = min(ratio, 1.28), -max(ratio, 0.8)
        assert curves["A = +1"][ratio] == pytest.approx((up, ratio if ratio < 1.28 else 0.0))
        assert curves["A = -1"][ratio] == pytest.approx((down, -ratio if ratio > 0.8 else 0.0))


def test_the_formula_of_dpo_is_the_log_sigmoid_of_its_margin() -> None:
    for margin, (objective, gradient) in curves_of("dpo", beta=0.1)["a pair"].items():
        assert objective == pytest.approx(-math.log1p(math.exp(-0.1 * margin)))
        assert gradient == pytest.approx(0.1 / (1 + math.exp(0.1 * margin)))


def test_a_file_is_checked_printed_and_drawn(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from dataclasses import dataclass\nfrom strop.algorithms.policy_gradient.grpo import GRPO\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(GRPO):\n    price: float = 0.1\n\n"
        "    def advantages(self, group):\n        return super().advantages(group) - self.price / group.bonus\n"
    )
    assert run_command(["check", "mine.py:Mine"], "") == 1
    printed = capsys.readouterr().out
    assert "'bonus' (mine.py, line 9, in Mine.advantages)" in printed
    assert printed.endswith("1 fault\n")

    assert run_command(["check", "grpo", "algorithm.objective.high=0.28", "--plot", "clip.png", "--json"], "") == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert Path("clip.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grqo"], "did you mean 'grpo'?"),
        (["grpo", "objective.hihg=0.3"], "did you mean 'high'?"),
        (["grpo", "0.28"], "options are written option=value"),
        (["sft", "--plot", "x.png"], "sft has no formula of a ratio or a margin"),
    ],
)
def test_a_wrong_name_or_option_is_a_usage_error(words: list[str], said: str, capsys: Any) -> None:
    assert run_command(["check", *words], "") == 2
    assert said in capsys.readouterr().err

"""Whole runs with ``policy.exact_on_policy``: at every token of every step the ratio of learner and engine is exactly 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.kinds import assert_same_run
from loop.runs import grpo, metrics_of, overrides, repeatable, strop, tiny_config
from loop.tiny import tiny_tokenizer
from support.models import FAMILIES, build
from support.sweep import sweep

pytestmark = pytest.mark.slow

EXACT: dict[str, Any] = {
    "policy.exact_on_policy": True,
    "policy.precision": "bfloat16",
    "grpo.val_period": 0,
    "checkpointing.enabled": False,
    "checkpointing.metric_name": None,
}


def check_exact(lines: dict[int, dict[str, float]], steps: int) -> None:
    assert list(lines) == list(range(1, steps + 1))
    for line in lines.values():
        assert line["train/token_mult_prob_error"] == line["train/token_mult_prob_error_max"] == 1.0
        assert line["train/gen_kl_error"] == 0.0
    assert max(line["train/grad_norm"] for line in lines.values()) > 0


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny models of the families, with a tokenizer."""
    return tmp_path_factory.mktemp("families")


def save_family(folder: Path, family: str) -> Path:
    model, tokenizer = build(family), tiny_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    return folder / family


@pytest.mark.parametrize("precision", sweep(["bfloat16", "float32"], "bfloat16"))
def test_the_ratio_is_exactly_one_while_the_policy_changes(precision: str, tiny: Path, tmp_path: Path) -> None:
    outcome = grpo(tiny, tmp_path, **{**EXACT, "policy.precision": precision, "grpo.max_num_steps": 4})
    assert outcome.code == 0, outcome.err
    check_exact(metrics_of(tmp_path / "logs"), 4)


@pytest.mark.exhaustive
def test_an_exact_run_learns_what_an_ordinary_one_learns(tiny: Path, tmp_path: Path) -> None:
    """In float32 both differ by rounding alone: the copies of weights that exact passes read are those of the step."""
    lines = {}
    for exact in (True, False):
        settings = {**EXACT, "policy.precision": "float32", "policy.exact_on_policy": exact, "grpo.max_num_steps": 4}
        assert grpo(tiny, tmp_path / str(exact), **settings).code == 0
        lines[exact] = metrics_of(tmp_path / str(exact) / "logs")
    for step, line in lines[True].items():
        for name in ("train/grad_norm", "train/loss", "train/reward"):
            if name in line:
                assert line[name] == pytest.approx(lines[False][step][name], rel=1e-3, abs=1e-5), (step, name)
    assert lines[True][4]["train/grad_norm"] != pytest.approx(lines[True][1]["train/grad_norm"], rel=1e-2)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_of_every_family_in_bfloat16_are_exact(family: str, families: Path, tmp_path: Path) -> None:
    settings = tiny_config(save_family(families, family), **{**EXACT, "grpo.max_num_steps": 20})
    outcome = strop("grpo", *overrides(settings), folder=tmp_path, timeout=500)
    assert outcome.code == 0, outcome.err
    check_exact(metrics_of(tmp_path / "logs"), 20)


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_exactly_and_ends_as_if_nothing_had_happened(tiny: Path, tmp_path: Path) -> None:
    settings = {"policy.exact_on_policy": True, "policy.precision": "bfloat16"}
    assert grpo(tiny, tmp_path / "whole", **settings).code == 0
    assert grpo(tiny, tmp_path / "killed", before=Kill("at the optimizer step", 4), **settings).code != 0
    assert grpo(tiny, tmp_path / "killed", **settings).code == 0
    check_exact(metrics_of(tmp_path / "killed" / "logs"), 6)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_what_cannot_be_exact_is_refused_before_the_run(tiny: Path, tmp_path: Path) -> None:
    outcome = grpo(tiny, tmp_path, **{**EXACT, "policy.generation.keep_sampling_mask": True, "policy.generation.top_k": 5})
    assert outcome.code != 0
    assert "with policy.exact_on_policy the filters keep the same tokens on both sides" in outcome.err


def test_a_deterministic_run_says_so_and_computes_on_a_cpu_what_an_ordinary_one_does(tiny: Path, tmp_path: Path) -> None:
    lines, said = {}, {}
    for deterministic in (True, False):
        folder = tmp_path / str(deterministic)
        settings = {"policy.deterministic": deterministic, "policy.generation.top_p": 0.95, "grpo.max_num_steps": 3}
        outcome = grpo(tiny, folder, **{**settings, "logger.console": ...})
        assert outcome.code == 0, outcome.err
        lines[deterministic] = repeatable(metrics_of(folder / "logs"))
        said[deterministic] = "to the last bit, in every process (policy.deterministic)" in outcome.out + outcome.err
    assert said == {True: True, False: False}
    assert lines[True] == lines[False], "a CPU adds in one order anyway"

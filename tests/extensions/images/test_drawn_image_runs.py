"""Whole runs on drawn images, with the model that examples/tiny_vlm.py writes."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.runs import metrics_of, overrides, strop
from strop.config.source.yaml_source import read_config_file

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIGS = EXAMPLES / "configs" / "drawn_images"


@pytest.fixture(scope="module")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language model of random weights."""
    folder: Path = runpy.run_path(str(EXAMPLES / "tiny_vlm.py"))["save"](tmp_path_factory.mktemp("tiny_vlm"), width=32)
    return folder


def drawn(kind: str, model: Path, **changes: Any) -> list[str]:
    """Return the command that runs an example's configuration with changes."""
    settings: Mapping[str, Any] = {
        "policy.model_name": str(model),
        "policy.num_threads": 1,
        "policy.device": "cpu",
        "checkpointing.checkpoint_dir": "results",
        "logger.log_dir": "logs",
        "logger.console": "none",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return [kind, "--config", str(CONFIGS / f"{kind}.yaml"), *overrides(dict(settings))]


SHORT = {
    "grpo.num_prompts_per_step": 2,
    "grpo.num_generations_per_prompt": 2,
    "grpo.max_num_steps": 2,
    "grpo.max_val_samples": 2,
    "grpo.val_at_start": False,
    "data.train.size": 8,
    "data.validation.size": 2,
    "checkpointing.save_period": 2,
}


def test_a_run_on_drawn_images_samples_trains_stores_and_shows_them(tiny_vlm: Path, tmp_path: Path) -> None:
    outcome = strop(*drawn("grpo", tiny_vlm, **SHORT), folder=tmp_path)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert sorted(step for step in metrics if step) == [1, 2]
    for step in (1, 2):
        assert metrics[step]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    images = list((tmp_path / "logs" / "rollouts" / "images").glob("*.png"))
    assert 2 <= len(images) <= 4  # one for each prompt, however many rollouts it has
    (validated,) = (tmp_path / "logs" / "validation").glob("step_*.json")
    samples = [task["samples"][0] for task in json.loads(validated.read_text())["tasks"]]
    assert all(sample["prompt_images"] and "base64," not in sample["messages"][0]["content"] for sample in samples)


@pytest.mark.exhaustive
def test_recorded_answers_about_images_are_learned_for_images_that_were_not_shown(tmp_path: Path) -> None:
    """Who does not look is right once in three: a loss of ln(3) / 2 over the number and the end of the turn."""
    model = runpy.run_path(str(EXAMPLES / "tiny_vlm.py"))["save"](tmp_path / "model")
    assert read_config_file(CONFIGS / "sft.yaml").values["sft"]["max_num_steps"] == 120
    outcome = strop(*drawn("sft", model), folder=tmp_path, timeout=600)
    assert outcome.code == 0, outcome.err
    losses = {step: line["validation/loss"] for step, line in metrics_of(tmp_path / "logs").items() if "validation/loss" in line}
    assert losses[0] > 2 and losses[120] < 0.47

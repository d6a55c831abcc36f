"""Whole runs of models that read images, on recorded data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.kinds import assert_same_run, recorded_config, write_rows
from loop.runs import Outcome, grpo, metrics_of, overrides, start
from support.vision_models import draw_image, save_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

RUNS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {  # family, section, changes
    "sft": ("qwen3_vl", "sft", {}),
    "sft, tiles": ("smolvlm", "sft", {}),
    "sft, frozen tower": ("gemma3", "sft", {"policy.freeze_vision_tower": True}),
    "sft, adapters": ("qwen2_5_vl", "sft", {"policy.dtensor_cfg.lora_cfg.enabled": True}),
    "sft, padded rows": ("gemma3", "sft", {"policy.sequence_packing.enabled": False}),
    "sft, recomputed": ("llava", "sft", {"policy.dtensor_cfg.activation_checkpointing": True}),
    "dpo": ("qwen2_5_vl", "dpo", {}),
    "dpo, adapters": ("llava", "dpo", {"policy.dtensor_cfg.lora_cfg.enabled": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda family: path if (path := folder / family).exists() else save_vision_model(family, path)


def write_images(folder: Path) -> None:
    """Write conversations and preferences about drawn images, which stand beside the data."""
    (folder / "drawn").mkdir()
    conversations, preferences = [], []
    for number in range(16):
        path = folder / "drawn" / f"{number}.png"
        path.write_bytes(draw_image(number, 30 + 30 * (number % 3), 44))
        parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": "which?"}]
        question = [{"role": "user", "content": parts if number % 4 else "which?"}]
        conversations.append({"messages": [*question, {"role": "assistant", "content": f"no. {number}"}]})
        preferences.append({"prompt": question, "chosen": f"no. {number}", "rejected": "none"})
    for kind, rows in (("conversations", conversations), ("preferences", preferences)):
        write_rows(folder / f"{kind}.jsonl", rows[:12])
        write_rows(folder / f"{kind}_held_out.jsonl", rows[12:])


def train(section: str, model: Path, folder: Path, before: Callable[[], None] | None = None, **changes: Any) -> Outcome:
    if not (folder / "drawn").exists():
        write_images(folder)
    settings = {**recorded_config(section, model, policy__max_total_sequence_length=160), **changes}
    return start([section, *overrides(settings)], folder, before=before).finish()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_images_trains(name: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    family, section, changes = RUNS[name]
    outcome = train(section, models(family), tmp_path, **changes)
    assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")
    assert logged[6]["train/loss"] < logged[1]["train/loss"]


def test_what_was_trained_with_images_loads_in_transformers(models: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    assert train("sft", models("qwen2_5_vl"), tmp_path, **{"sft.max_num_steps": 2}).code == 0
    folder = tmp_path / "results" / "step_2" / "policy" / "weights"
    assert type(AutoModelForImageTextToText.from_pretrained(folder)).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert AutoImageProcessor.from_pretrained(folder).patch_size == 14
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]


def test_an_image_that_is_missing_drops_its_example_and_says_so(models: Callable[[str], Path], tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "drawn" / "1.png").unlink()
    outcome = train("sft", models("qwen3_vl"), tmp_path)
    assert outcome.code == 0, outcome.err
    assert any(line.get("train/groups_dropped") for line in metrics_of(tmp_path / "logs").values())


SAMPLED: Mapping[str, Any] = {
    "policy.max_total_sequence_length": 256,
    "policy.generation.torch_cfg.kv_cache_memory_gb": 0.02,
    "data.max_input_seq_length": 200,
    "data.train.env_name": "shown",
    "data.validation.env_name": "shown",
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "env.shown.type": f"{Path(__file__).with_name('shown.py')}:Shown",
    "env.shown.turns": 2,
    "grpo.num_generations_per_prompt": 4,
    "grpo.max_rollout_turns": 2,
    "grpo.max_num_steps": 4,
    "grpo.val_period": 2,
}


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm"])
def test_grpo_with_images_that_is_killed_ends_as_if_nothing_had_happened(
    family: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, kills in {"whole": [None], "killed": [Kill("at a save", 1), Kill("at a rename", 1, "after"), None]}.items():
        (tmp_path / name).mkdir()
        for number, kill in enumerate(kills):
            outcome = grpo(models(family), tmp_path / name, before=kill, **SAMPLED)
            assert (outcome.code == 0) == (number == len(kills) - 1), outcome.err
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    logged = metrics_of(tmp_path / "whole" / "logs")
    assert all(line["train/token_mult_prob_error"] < 1.0001 for step, line in logged.items() if step), "sampler and learner agree"
    assert len({line["train/loss"] for step, line in logged.items() if step}) > 1


def test_two_ranks_and_an_engine_elsewhere_give_the_curve_of_one_process(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Images travel to the engine and in the shares of the ranks. Ranks add float32 gradients in another order."""
    curves = []
    for name, cluster in {"one": {}, "two": {"cluster.backend": "ray", "cluster.gpus_per_node": 2}}.items():
        (tmp_path / name).mkdir()
        outcome = grpo(models("qwen3_vl"), tmp_path / name, **{**SAMPLED, **cluster, "grpo.max_num_steps": 2})
        assert outcome.code == 0, outcome.err
        logged = metrics_of(tmp_path / name / "logs")
        curves.append([[logged[step][f"train/{tag}"] for tag in ("loss", "grad_norm", "reward")] for step in (1, 2)])
    assert curves[1] == [pytest.approx(step, rel=2e-3, abs=1e-5) for step in curves[0]]

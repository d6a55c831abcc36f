"""Whole runs whose policy samples about images, with images in prompts and in observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loop.kinds import sampling_config
from loop.runs import Outcome, metrics_of, overrides, start
from support.vision_models import save_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

MISMATCH = 1e-4  # train/token_mult_prob_error - 1: the mean of exp |difference of log-probabilities|

RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # family, changes
    "pages": ("qwen2_5_vl", {}),
    "slots": ("gemma3", {"policy.generation.torch_cfg.paged_cache": False}),
    "asynchronous": ("smolvlm", {"grpo.async_grpo.enabled": True}),
    "several turns": ("qwen3_vl", {"grpo.max_rollout_turns": 2, "env.shown.turns": 2}),
    "frozen tower": ("llava", {"policy.freeze_vision_tower": True}),
    "Ray": ("qwen2_5_vl", {"cluster.backend": "ray"}),
}


def train(
    family: str, folder: Path, models: Path, changes: Mapping[str, Any], before: Callable[[], None] | None = None
) -> Outcome:
    model = models / family
    if not model.exists():
        save_vision_model(family, model)
    settings = sampling_config("grpo", model, policy__max_total_sequence_length=160, policy__precision="float32")
    for name in ("type", "easy", "flat"):
        settings.pop(f"env.graded.{name}", None)
    shown = Path(__file__).with_name("shown.py")
    settings |= {
        "data.train.env_name": "shown",
        "data.validation.env_name": "shown",
        "env.shown.type": f"{shown}:Shown",
        **changes,
    }
    return start(["grpo", *overrides(settings)], folder, before=before).finish(280)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_samples_and_trains_with_images(name: str, models: Path, tmp_path: Path) -> None:
    family, changes = RUNS[name]
    outcome = train(family, tmp_path, models, changes)
    assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")
    steps = [line for line in logged.values() if "train/token_mult_prob_error" in line]
    assert len(steps) >= 3
    if name != "asynchronous":
        assert max(line["train/token_mult_prob_error"] for line in steps) < 1 + MISMATCH
    assert not any(line.get("train/groups_dropped") for line in steps), outcome.err


@pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("torchvision") is None,
    reason="vLLM's processors need torchvision: pip install torchvision",
)
def test_a_run_samples_about_images_with_vllm(models: Path, tmp_path: Path) -> None:
    import strop.models  # noqa: F401  before Transformers imports torchvision
    from transformers import Qwen3VLVideoProcessor  # isort: skip

    if not (models / "qwen3_vl").exists():
        save_vision_model("qwen3_vl", models / "qwen3_vl")
    Qwen3VLVideoProcessor(patch_size=16, temporal_patch_size=2, merge_size=2).save_pretrained(models / "qwen3_vl")
    changes = {
        "policy.generation.backend": "vllm",
        "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
        "grpo.max_rollout_turns": 2,
    }
    outcome = train("qwen3_vl", tmp_path, models, {**changes, "env.shown.turns": 2, "grpo.max_num_steps": 2})
    assert outcome.code == 0, outcome.err
    steps = [line for line in metrics_of(tmp_path / "logs").values() if "train/token_mult_prob_error" in line]
    assert len(steps) == 2 and max(line["train/token_mult_prob_error"] for line in steps) < 1 + MISMATCH
    assert all(line["weights/tensors_not_read_back"] == 0 for line in steps)

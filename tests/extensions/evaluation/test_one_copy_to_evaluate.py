"""An evaluation holds the weights once: bytes of tensors that are alive, counted while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loop.kinds import recorded_config, write_data
from loop.runs import overrides
from loop.tiny import build_tiny
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.evaluation import evaluation_engines
from strop.extensions.evaluation.evaluate import CheckpointEvaluation, evaluate_any
from strop.extensions.evaluation.evaluation_folder import make_evaluation_job
from strop.extensions.recorded.recorded_scores import LossValidator
from strop.runs.models import load_policy
from strop.types import user
from support.models import living_bytes, weight_bytes


def test_a_checkpoint_s_loss_is_evaluated_on_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the masters and the average of a run that trains."""
    model = build_tiny(tmp_path / "tiny")
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = recorded_config("sft", model)
    more = {"policy.precision": "bfloat16", "policy.weights_dtype": "bfloat16", "policy.ema.enabled": True}
    config: Any = load_config(None, overrides({**settings, **more}), root=TRAINING_RUNS["sft"]).config
    found: list[int] = []
    evaluate = LossValidator.evaluate

    async def measure(validator: LossValidator, step: int, tracker: Any = None) -> Mapping[str, float]:
        found.append(living_bytes())
        return await evaluate(validator, step, tracker)

    monkeypatch.setattr(LossValidator, "evaluate", measure)
    before = living_bytes()
    report = asyncio.run(evaluate_any(CheckpointEvaluation(SavedModel(str(model)), SimpleNamespace(config=config))))  # type: ignore[arg-type]
    size = weight_bytes(load_policy(config.policy).network.model)
    assert report.metrics["loss"] > 0 and size <= found[0] - before < 1.5 * size


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_merged_into_a_folder_for_vllm_and_other_files_are_written_as_one(
    merge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        evaluation_engines.subprocess, "run", lambda command, **options: commands.append(command) or SimpleNamespace(returncode=0)
    )
    evaluation_engines._export("name", tmp_path, merge=merge)
    assert ("--merge" in commands[0]) == merge, "strop export refuses to merge what has no adapters"


def test_an_evaluation_by_vllm_loads_no_weights_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    async def start(engines: Any, **options: Any) -> Any:
        return SimpleNamespace(close=lambda: asyncio.sleep(0))

    monkeypatch.setattr(
        evaluation_engines, "make_local_engines", lambda launch, *arguments, **options: launched.append(launch) or []
    )
    monkeypatch.setattr(evaluation_engines, "start_serving_pool", start)
    folder = build_tiny(tmp_path / "tiny")
    values = {
        "eval": {},
        "generation": {"model_name": str(folder), "backend": "vllm", "device": "cpu", "vllm_cfg": {"max_model_len": 64}},
        "data": {"size": 2},
        "env": {"arithmetic": {}},
    }
    job = make_evaluation_job(load_config(None, root=EvalRunConfig, values=values, check=False).config)
    before = living_bytes()

    async def measure() -> int:
        async with evaluation_engines.open_engines(job, lambda text: None, output_folder=None) as opened:
            assert opened.template.encode_prompt((user("1+1="),))
            return living_bytes()

    assert asyncio.run(measure()) <= before
    assert launched[0].load_weights and launched[0].model == str(folder), "vLLM reads them where they are"

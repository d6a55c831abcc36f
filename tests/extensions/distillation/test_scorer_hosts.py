"""Runs over Ray whose teachers have processes of their own: the curve of one process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.kinds import sampling_config
from loop.runs import Environ, metrics_of, overrides, start
from loop.test_cluster_runs import RAY, curves_agree
from loop.tiny import build_tiny
from loop.victims import MARK, find_processes
from strop.config import dump_config, load_config
from strop.distributed.base import ActorOptions
from strop.distributed.cluster_config import ClusterConfig
from strop.extensions.distillation.distillation import TEACHER_LOGPROBS, Distillation
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.extensions.distillation.distilled_source import spawn_teachers
from strop.extensions.distillation.teachers import StudentInfo, load_teacher
from strop.models.loading import load_tokenizer
from strop.sampling import Sampling
from support.rollouts import pack_for, simple_groups

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
from strop.distributed.ray import connect
from support.sweep import sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that is not the student."""
    return build_tiny(tmp_path_factory.mktemp("teacher") / "tiny", seed=5)


def distil(model: Path, teacher: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    settings = {
        **sampling_config("distillation", model),
        "distillation.max_num_steps": STEPS,
        "checkpointing.enabled": False,
        "teacher.model_name": str(teacher),
        **changes,
    }
    outcome = start(["distillation", *overrides(settings)], folder, before=Environ({MARK: str(folder)})).finish(300)
    assert outcome.code == 0, outcome.err + outcome.out


@pytest.mark.parametrize("columns", sweep(["sampled", "likeliest"]))
def test_a_teacher_in_processes_of_its_own_gives_the_curve_of_one_process(
    columns: str, tiny: Path, other: Path, tmp_path: Path
) -> None:
    asked = {"sampled": {"algorithm.name": "distillation"}, "likeliest": {"distillation.topk_logits_k": 8}}[columns]
    hosts = {"sampled": 1, "likeliest": 2}[columns]
    distil(tiny, other, tmp_path / "one", asked)
    distil(tiny, other, tmp_path / "apart", {**asked, **RAY, "teacher.hosts": hosts})
    curves_agree(tmp_path / "one", tmp_path / "apart", steps=STEPS)
    assert metrics_of(tmp_path / "apart" / "logs")[STEPS]["train/loss"] != 0.0
    workers = {path.stem for path in (tmp_path / "apart" / "logs" / "workers").iterdir()}
    assert workers == {"learner-0", "engine-0", *(f"teacher-{number}" for number in range(hosts))}
    assert find_processes(str(tmp_path / "apart")) == []


@pytest.mark.exhaustive
def test_teachers_with_and_without_processes_of_their_own_are_mixed_as_in_one_process(
    tiny: Path, other: Path, tmp_path: Path
) -> None:
    asked = {"algorithm.name": "distillation", "teachers.second.model_name": str(tiny), "teachers.second.weight": 2.0}
    apart = {**RAY, "cluster.gpus_per_node": 2, "teachers.second.hosts": 1}
    distil(tiny, other, tmp_path / "one", asked)
    distil(tiny, other, tmp_path / "apart", {**asked, **apart})
    curves_agree(tmp_path / "one", tmp_path / "apart", steps=STEPS)


@pytest.mark.exhaustive
def test_a_teacher_s_process_that_is_killed_is_replaced_at_the_next_call(tiny_model_folder: Path, tmp_path: Path) -> None:
    settings = {
        **sampling_config("distillation", tiny_model_folder),
        **RAY,
        "teacher.model_name": str(tiny_model_folder),
        "algorithm.name": "distillation",
    }
    config: Any = load_config(None, overrides(settings), root=DistillationRunConfig).config
    student = StudentInfo(len(load_tokenizer(str(tiny_model_folder))), load_tokenizer(str(tiny_model_folder)))
    columns = frozenset({TEACHER_LOGPROBS})
    build = partial(load_teacher, "teacher", config, student, columns, Sampling())
    groups = simple_groups((3, (4, 2)), (2, (3, 5)), (4, (1, 1)))
    batch = pack_for(groups, Distillation())

    async def ask() -> tuple[torch.Tensor, torch.Tensor]:
        cluster = await connect(ClusterConfig(), on_cpu=True, output_folder=tmp_path / "workers")
        try:
            places = [ActorOptions(name=f"teacher-{number}", node=0) for number in range(2)]
            source: Any = (await spawn_teachers(cluster, {"teacher": build}, columns, {"teacher": places}))["teacher"][
                TEACHER_LOGPROBS
            ]
            before = await source.columns(batch, groups)
            victim = (await source.actors[1].start()).pid
            os.kill(victim, signal.SIGKILL)
            after = await source.columns(batch, groups)
            assert source.actors[1].restarts == 1 and (await source.actors[1].start()).pid != victim
            return before[TEACHER_LOGPROBS], after[TEACHER_LOGPROBS]
        finally:
            await cluster.close()

    before, after = asyncio.run(ask())
    assert torch.equal(before, after) and before.abs().sum() > 0


def test_each_of_several_teachers_follows_the_policy_as_a_single_one_does(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "policy: {model_name: m, precision: float32, device: cpu, sequence_packing: {logprob_mb_tokens: 77}}\n"
        "data: {train: {dataset_name: arithmetic}}\nenv: {arithmetic: {}}\ndistillation: {num_prompts_per_step: 2}\n"
        "teacher: {model_name: u}\nteachers: {a: {model_name: u}, b: {model_name: v, precision: bfloat16}}\n"
    )
    config = load_config(tmp_path / "run.yaml", root=DistillationRunConfig, check=False).config
    assert config.teachers["a"] == config.teacher and config.teacher.weights_dtype == "float32"
    other = config.teachers["b"]
    assert (other.precision, other.weights_dtype, other.device, other.logprob_mb_tokens) == ("bfloat16", "bfloat16", "cpu", 77)
    assert other.tokenizer.name == "v"
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "saved.yaml", root=DistillationRunConfig, check=False).config == config

"""The models of a rank: what each rank holds of them, and that together the ranks say what a whole model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor, nn

from loop.tiny import build_tiny
from strop.algorithms.base import CANDIDATES
from strop.config import TrainingRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.distributed.workers.learner_worker import ColumnShard, merge_columns
from strop.extensions.distillation import teachers
from strop.extensions.distillation.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.extensions.distillation.teachers import describe_student, load_teacher
from strop.learner.parallel.parallel_dims import to_local
from strop.problems import ConfigError
from strop.runs.cluster.torch_rank_builders import build_rank_models, load_rank_policy
from strop.runs.models import load_policy
from strop.runs.run_algorithm import make_run_algorithm
from strop.sampling import Sampling
from strop.types import Batch
from support.rollouts import pack_for, simple_groups

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=0.7)
SHAPES = ((9, (6, 2, 5)), (4, (7,)), (3, (3, 8)))
COLUMNS = {"distillation": TEACHER_LOGPROBS, "topk_distillation": TEACHER_CANDIDATES}


def config_of(section: str, model: Path, *overrides: str) -> TrainingRunConfig:
    ranks = ["cluster.backend=ray", "cluster.gpus_per_node=2", "policy.device=cpu", "policy.precision=float32"]
    data = ["data.train.dataset_name=squad"] if section == "dpo" else ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    base = [f"policy.model_name={model}", f"{section}.val_period=0", "checkpointing.metric_name=null", *ranks, *data]
    return load_config(None, [*base, *overrides], root=TRAINING_RUNS[section]).config


def distillation(model: Path, teacher: Path, *overrides: str) -> DistillationRunConfig:
    found = config_of("distillation", model, f"teacher.model_name={teacher}", "distillation.topk_logits_k=6", *overrides)
    assert isinstance(found, DistillationRunConfig)
    return found


def batch_of(config: DistillationRunConfig) -> Batch:
    batch = pack_for(simple_groups(*SHAPES), make_run_algorithm(config))
    return replace(batch, tokens=batch.tokens % 90, target=batch.target % 90)  # the tiny model's vocabulary


def held_bytes(model: nn.Module, part: str = "") -> int:
    return sum(to_local(each).untyped_storage().nbytes() for name, each in model.named_parameters() if part in name)


def score_on_rank(rank: int, configs: list[DistillationRunConfig]) -> list[tuple[list[ColumnShard], int]]:
    found = []
    for config in configs:
        policy, algorithm = load_rank_policy(config), make_run_algorithm(config)
        models = build_rank_models(config, algorithm, SAMPLING, None, policy, "cpu", 2)
        source: Any = models.columns["teacher", COLUMNS[config.algorithm.name]]
        shards = [ColumnShard(index, columns) for index, columns in source.columns_local(batch_of(config))]
        found.append((shards, held_bytes(source.teacher.network.model, part_of(config))))
    return found


def part_of(config: DistillationRunConfig) -> str:
    """Tensor-parallel ranks divide the decoder's layers; the embedding and the output layer they divide only with other ranks."""
    return "_proj" if config.teacher.dtensor_cfg.tensor_parallel_size > 1 else ""


def whole_teacher(config: DistillationRunConfig) -> tuple[Mapping[str, Tensor], int]:
    column = COLUMNS[config.algorithm.name]
    source: Any = load_teacher("teacher", config, describe_student(load_policy(config.policy)), [column], SAMPLING)[column]
    return source.columns(batch_of(config), ()), held_bytes(source.teacher.network.model, part_of(config))


SAMPLED = "algorithm.name=distillation"
LAYOUTS = {
    "as the student": (),
    "other layers": ("teacher.dtensor_cfg.tensor_parallel_size=2",),
    "other tokens": ("teacher.dtensor_cfg.context_parallel_size=2", SAMPLED),
    "the student's layers": ("policy.dtensor_cfg.tensor_parallel_size=2", SAMPLED),
    "rounded weights": ("teacher.precision=bfloat16", SAMPLED),
}


def test_a_teacher_is_divided_as_its_section_says_and_its_columns_are_those_of_a_whole_one(tmp_path: Path) -> None:
    """Whatever the student's layout is, each of two ranks holds half of the teacher's bytes."""
    student, teacher = build_tiny(tmp_path / "student"), build_tiny(tmp_path / "teacher", seed=5)
    configs = [distillation(student, teacher, *layout) for layout in LAYOUTS.values()]
    ranks: Any = run_on_ranks(2, score_on_rank, configs)
    for number, config in enumerate(configs):
        wanted, whole = whole_teacher(config)
        found = merge_columns([shard for rank in ranks for shard in rank[number][0]], len(batch_of(config).target))
        assert found.keys() == wanted.keys()
        for name, column in wanted.items():
            atol = 2e-6 if config.teacher.precision == "float32" else 1e-2
            assert torch.equal(found[name], column) if name == CANDIDATES else torch.allclose(found[name], column, atol=atol)
        assert [rank[number][1] / whole for rank in ranks] == pytest.approx([0.5, 0.5], rel=0.01)


def test_a_teacher_s_weights_have_its_precision_and_only_then_reach_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny(tmp_path / "model")
    single = ("cluster.backend=local", "cluster.gpus_per_node=1", SAMPLED)
    whole, rounded, cast = (
        distillation(model, model, *single, *more)
        for more in ((), ("teacher.precision=bfloat16",), ("teacher.precision=bfloat16", "teacher.weights_dtype=float32"))
    )
    columns, held = zip(*(whole_teacher(config) for config in (whole, rounded, cast)), strict=True)
    assert [size / held[0] for size in held] == [1, 0.5, 1]
    error = [(column[TEACHER_LOGPROBS] - columns[0][TEACHER_LOGPROBS]).abs().max() for column in columns]
    assert error[0] == 0 and 0 < error[1] < 0.05 and 0 < error[2] < 0.05
    with pytest.raises(ConfigError, match=r"teacher\.weights_dtype: .*nothing is computed in float32"):
        distillation(model, model, "teacher.weights_dtype=bfloat16")

    moved: list[torch.dtype] = []
    move = nn.Module.to

    def record(module: nn.Module, *target: Any, **more: Any) -> nn.Module:
        if target == (torch.device("meta"),):
            moved.append(next(module.parameters()).dtype)
        return move(module, *target, **more)

    monkeypatch.setattr(teachers, "resolve_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(nn.Module, "to", record)
    student = describe_student(load_policy(rounded.policy))
    assert teachers.load_teacher_network("teacher", rounded, student).network.device.type == "meta"
    assert moved == [torch.bfloat16]


def scorers_on_rank(rank: int, configs: list[TrainingRunConfig]) -> list[tuple[list[str], float]]:
    found = []
    for config in configs:
        policy = load_rank_policy(config)
        models = build_rank_models(config, make_run_algorithm(config), SAMPLING, None, policy, "cpu", 2)
        reference: Any = models.scorers.get("reference")
        share = held_bytes(reference.network.model) / held_bytes(policy.network.model) if reference else 0.0
        found.append((sorted(models.scorers), share))
    return found


def test_ranks_keep_a_share_of_the_reference_and_none_if_it_is_computed_once_before(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model")
    configs = [config_of("dpo", model, *more) for more in ((), ("dpo.precompute_reference=true",))]
    for kept, none in run_on_ranks(2, scorers_on_rank, configs):
        assert kept == (["reference", "untrained"], 1.0)
        assert none == (["untrained"], 0.0)


def test_a_teacher_that_cannot_be_divided_is_refused_at_its_key(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model")
    with pytest.raises(AssertionError, match=r"teacher\.dtensor_cfg: .*heads"):
        run_on_ranks(
            3,
            refused_on_rank,
            distillation(model, model, "cluster.gpus_per_node=3", "teacher.dtensor_cfg.tensor_parallel_size=3"),
        )


def refused_on_rank(rank: int, config: DistillationRunConfig) -> None:
    build_rank_models(config, make_run_algorithm(config), SAMPLING, None, load_rank_policy(config), "cpu", 3)

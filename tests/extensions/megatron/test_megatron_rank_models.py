"""The models of a rank that Megatron Core trains: together the ranks say what a whole model of PyTorch says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from loop.tiny import build_tiny
from strop.algorithms.base import CANDIDATES, Outputs
from strop.config import TrainingRunConfig, load_config
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import TRAINING_RUNS, PpoRunConfig
from strop.distributed.workers.learner_worker import ColumnShard, merge_columns
from strop.extensions.distillation.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.extensions.distillation.teachers import describe_student, load_teacher
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs, tensor_fields
from strop.runs.learner_backend import load_backend
from strop.runs.models import load_training_policy, make_critic
from strop.runs.run_algorithm import make_run_algorithm
from strop.sampling import Sampling
from strop.types import Batch
from support.rollouts import pack_for, simple_groups

pytest.importorskip("megatron.core", reason="Megatron Core is not installed: pip install -e '.[megatron]'")
pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=0.7)
PAIRS = ((9, (6, 2)), (4, (7, 3)), (3, (3, 8)))
BOUND = 2e-6  # of log-probabilities and values in float32
TP2, PP2 = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
RECORDED = ("sft", "dpo", "rm")


def config_of(section: str, model: Path, *overrides: str) -> TrainingRunConfig:
    data = ["data.train.dataset_name=squad"] if section in RECORDED else ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    base = [f"policy.model_name={model}", f"{section}.val_period=0", "checkpointing.metric_name=null", "cluster.gpus_per_node=2"]
    device = ["policy.device=cpu", "policy.precision=float32", *enabled("policy")]
    return load_config(None, [*base, *device, *data, *overrides], root=TRAINING_RUNS[section]).config


def enabled(model: str, *sizes: str) -> list[str]:
    section = f"{model}.megatron_cfg"
    switches = [f"{section}.enabled=true", f"{model}.dtensor_cfg.enabled=false"]
    return [*switches, *(f"{section}.{size}" for size in sizes)]


def batch_of(config: TrainingRunConfig) -> Any:
    batch = pack_for(simple_groups(*PAIRS), make_run_algorithm(config))
    return replace(batch, tokens=batch.tokens % 90, target=batch.target % 90)  # the tiny model's vocabulary


@dataclass
class Said:
    """What one rank says."""

    scores: dict[str, MicroBatchOutputs] = field(default_factory=dict)
    columns: dict[tuple[str, str], list[ColumnShard]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    fingerprint: str = ""
    folder: list[str] = field(default_factory=list)


def ask_rank(rank: int, configs: Mapping[str, TrainingRunConfig], folder: Path) -> dict[str, Said]:
    said = {}
    for name, config in configs.items():
        backend = load_backend(config.policy.learner)
        policy, batch = backend.load_policy(config), batch_of(config)
        models = backend.build_models(config, make_run_algorithm(config), SAMPLING, None, policy, "cpu", 2)
        found = said[name] = Said(fingerprint=policy.fingerprint())
        models.offload.offload()
        models.offload.onload()
        for scorer, each in {**models.learners, **models.scorers}.items():
            found.scores[scorer] = each.score_local(batch)
        for key, source in models.columns.items():
            found.columns[key] = [ColumnShard(index, columns) for index, columns in source.columns_local(batch)]
        weights = {weight.name: weight.gather() for weight in models.weights.iter_weights()}
        if rank == 0:
            found.weights = weights
            backend.write_model_folder(policy, config, folder / name)
            found.folder = sorted(path.name for path in (folder / name).iterdir())
    return said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return build_tiny(folder / "model"), build_tiny(folder / "teacher", seed=5)


@pytest.fixture(scope="module")
def configs(models: tuple[Path, Path]) -> dict[str, TrainingRunConfig]:
    model, teacher = models
    taught = ["distillation.topk_logits_k=6", f"teacher.model_name={teacher}", *enabled("policy", PP2)]
    return {
        "grpo": config_of(
            "grpo", model, *enabled("policy", TP2, "sequence_parallel=true"), "loss_fn.reference_policy_kl_penalty=0.1"
        ),
        "dpo": config_of("dpo", model, *enabled("policy", PP2), "dpo.precompute_reference=true"),
        "rm": config_of("rm", model, *enabled("policy", PP2)),
        "ppo": config_of("ppo", model, *enabled("policy", TP2), *enabled("value", PP2)),
        "teacher": config_of("distillation", model, *taught, *enabled("teacher", TP2)),
        "sampled": config_of("distillation", model, *taught, *enabled("teacher", PP2), "algorithm.name=distillation"),
        "torch teacher": config_of("distillation", model, *taught),
    }


@pytest.fixture(scope="module")
def ranks(configs: dict[str, TrainingRunConfig], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Said]]:
    return run_on_ranks(2, ask_rank, configs, tmp_path_factory.mktemp("folders"))


def assembled(ranks: list[dict[str, Said]], name: str, scorer: str, batch: Batch) -> Outputs:
    return assemble_outputs([rank[name].scores[scorer] for rank in ranks], len(batch.target))


def assert_same(found: Any, wanted: Any) -> None:
    expected = dict(tensor_fields(wanted))
    assert expected.keys() == dict(tensor_fields(found)).keys()
    for name, column in tensor_fields(found):
        assert torch.allclose(column, expected[name].detach().float(), rtol=BOUND, atol=BOUND), name


@pytest.mark.parametrize("name", ["grpo", "dpo", "rm", "ppo", "teacher"])
def test_ranks_score_as_the_whole_model_and_send_its_weights_bit_for_bit(
    name: str, configs: dict[str, TrainingRunConfig], ranks: list[dict[str, Said]]
) -> None:
    config = configs[name]
    policy, batch = load_training_policy(config), batch_of(config)
    wanted = policy.network.outputs(batch, SAMPLING)
    scorers = {"policy", "untrained"} | ({"reference"} if name == "grpo" else set()) | ({"value"} if name == "ppo" else set())
    assert set(ranks[0][name].scores) == scorers  # a reference that is computed once before is not kept
    for scorer in scorers - {"value"}:
        assert_same(assembled(ranks, name, scorer, batch), wanted)
    if isinstance(config, PpoRunConfig):
        assert_same(assembled(ranks, name, "value", batch), make_critic(config, policy).outputs(batch, SAMPLING))
    sent, ordinary = ranks[0][name].weights, policy.network.model.state_dict()
    assert list(sent) == list(ordinary) and all(torch.equal(sent[key], tensor) for key, tensor in ordinary.items())
    assert {"config.json", "tokenizer.json"} <= set(ranks[0][name].folder)
    assert ranks[0][name].fingerprint == ranks[1][name].fingerprint == ranks[0]["grpo"].fingerprint


@pytest.mark.parametrize("name", ["teacher", "sampled", "torch teacher"])
def test_a_teacher_has_sizes_or_a_backend_of_its_own_and_its_columns_are_those_of_a_whole_one(
    name: str, configs: dict[str, TrainingRunConfig], ranks: list[dict[str, Said]]
) -> None:
    config = configs[name]
    assert isinstance(config, DistillationRunConfig)
    column = TEACHER_LOGPROBS if name == "sampled" else TEACHER_CANDIDATES
    batch, student = batch_of(config), describe_student(load_training_policy(config))
    wanted = load_teacher("teacher", config, student, [column], SAMPLING)[column].columns(batch, ())
    shards = [shard for rank in ranks for shard in rank[name].columns["teacher", column]]
    found = merge_columns(shards, len(batch.target))
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        same = (
            torch.equal(found[key], values) if key == CANDIDATES else torch.allclose(found[key], values, rtol=BOUND, atol=BOUND)
        )
        assert same, key


def test_megatron_is_on_ranks_also_with_one_device(models: tuple[Path, Path]) -> None:
    counts = count_devices(config_of("grpo", models[0], "cluster.gpus_per_node=1"))
    assert counts.uses_ray and counts.learner_devices == 1


@pytest.mark.exhaustive
def test_sizes_that_do_not_divide_the_model_are_refused_at_their_key(models: tuple[Path, Path]) -> None:
    with pytest.raises(AssertionError, match=r"policy\.megatron_cfg\.pipeline_model_parallel_size: .*3 stages"):
        run_on_ranks(
            3, build_on_rank, config_of("grpo", models[0], "cluster.gpus_per_node=3", *enabled("policy", PP2[:-1] + "3"))
        )


def build_on_rank(rank: int, config: TrainingRunConfig) -> None:
    backend = load_backend(config.policy.learner)
    backend.build_models(config, make_run_algorithm(config), SAMPLING, None, backend.load_policy(config), "cpu", 3)

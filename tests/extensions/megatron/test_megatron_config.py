"""Configurations that name Megatron Core: what cannot work is refused before a run starts, with the reason and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from project.test_example_configs import CONFIGS, section_of
from project.test_example_configs import in_the_repository as in_the_repository
from project.test_example_configs import test_a_documented_command_is_understood as understand
from strop import cli
from strop.config import ConfigError, load_config
from strop.config.schema.run_config import TRAINING_RUNS, PpoRunConfig
from strop.extensions.megatron.megatron_config import Fp8Config, MegatronConfig
from strop.extensions.megatron.megatron_dims import MegatronDims, model_errors
from strop.models.local_files import ModelShape
from strop.monitoring.run_starts import find_versions
from support.megatron_families import make_config
from support.needs import needs_megatron
from support.overrides import RUN
from unit.cli.test_dry_run import RUN as DRY_RUN
from unit.cli.test_dry_run import dry_run
from unit.cli.test_dry_run_of_models import refuse, write_config
from unit.config.test_config_checks import AUTO, accepted, refusal
from unit.runs.test_local_device import TWO_NODES, lines

M = "policy.megatron_cfg"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 8}"], "8 ranks do not divide the 1 devices"),
        (["policy.megatron_cfg={enabled: true, peft: {enabled: true, dropout: 0.1}}"], "rollouts are sampled without dropout"),
        (
            ["policy.dtensor_cfg.enabled=false"],
            "found false, and policy.megatron_cfg.enabled is false too, which leaves no learner",
        ),
        ([f"{M}.enabled=true", "policy.ema.enabled=true"], "keeps no moving average"),
        (
            [f"{M}.enabled=true", "policy.exact_on_policy=true", "cluster.backend=ray"],
            "add in an order that depends on the batch",
        ),
        ([f"{M}.enabled=true", "policy.dequantize_base_checkpoint=true"], "where weights and scales are separate"),
        (
            [f"{M}.enabled=true", "policy.fp8.enabled=true"],
            "found true, but it applies to the torch learner, and this run trains with Megatron Core",
        ),
        ([f"{M}.enabled=true", "policy.router_losses.aux_loss_coeff=0.1"], "which has its own keys for them"),
    ],
)
def test_what_megatron_core_cannot_do_is_refused(overrides: list[str], reason: str) -> None:
    assert reason in str(refusal(*overrides))


def test_what_the_torch_learner_would_read_is_said_to_have_no_effect() -> None:
    (warning,) = accepted(f"{M}.enabled=true", "policy.attention_kernel=plain")
    assert "policy.attention_kernel: it has no effect: Megatron Core's layers attend with" in warning


def test_a_budget_that_megatron_core_does_not_measure_is_refused() -> None:
    text = str(refusal(AUTO, f"{M}.enabled=true"))
    assert "train_mb_tokens: found auto, but the Megatron Core learner measures no memory" in text


MEGATRON = ["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"]


def test_megatron_core_needs_ranks() -> None:
    (problem,) = refusal(*MEGATRON, "cluster.backend=local").problems
    assert problem.key == "cluster.backend" and "Megatron Core runs on ranks, which are processes of Ray" in str(problem)
    assert "Set it to auto or ray, or policy.backend=torch." in str(problem)
    for backend in ("auto", "ray"):
        accepted(*MEGATRON, f"cluster.backend={backend}")


def test_a_critic_of_megatron_core_is_a_network_of_its_own() -> None:
    critic = [*RUN[:3], *MEGATRON, "value.megatron_cfg.enabled=true", "value.dtensor_cfg.enabled=false"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*critic, "value.head_only=true"], root=PpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == "value.head_only" and "the policy's last stage has no value head" in str(problem)
    assert "Set it to false, or policy.backend=torch." in str(problem)
    load_config(None, critic, root=PpoRunConfig)


def test_a_critic_has_the_learner_of_the_policy() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN[:3], f"{M}.enabled=true"], root=PpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == "value.megatron_cfg.enabled" and "found false, but policy.megatron_cfg.enabled is true" in str(problem)
    assert problem.fix.endswith("Set policy.backend=torch to train all models with the torch learner, or megatron.")


def test_the_layout_of_megatron_core_has_stages() -> None:
    sizes = ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"]
    found = lines(*TWO_NODES, "policy.megatron_cfg.enabled=true", *sizes, "policy.generation.backend=torch")
    assert found["learner"] == "8 ranks on 2 nodes: Megatron Core, 2 data x 2 stages x 1 context x 2 tensor"


def test_layers_and_experts_are_counted_where_megatron_core_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    values = {
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "num_experts": 8,
    }
    (folder / "model" / "config.json").write_text(json.dumps(values))
    sizes = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 16}
    words = [*DRY_RUN, "policy.model_name=model", "cluster.gpus_per_node=64", "policy.megatron_cfg.enabled=true"]
    said = dry_run(capsys, "grpo", *words, *(f"policy.megatron_cfg.{key}={size}" for key, size in sizes.items()), code=2)
    assert "policy.megatron_cfg.pipeline_model_parallel_size: found 4: 4 stages cannot share the 6 layers of model evenly" in said
    assert "policy.megatron_cfg.expert_model_parallel_size: found 16, which does not divide the 8 experts" in said
    (folder / "model" / "config.json").write_text(json.dumps({**values, "model_type": "deepseek_v4"}))
    assert "does not train models of type deepseek_v4: its attention reads compressed keys" in dry_run(
        capsys, "grpo", *words, code=2
    )


RECURRENT = {"num_attention_heads": 12, "num_key_value_heads": 6}
CANNOT: list[tuple[str, dict[str, Any], dict[str, int], str]] = [
    # family, changes of its configuration, sizes, what is said
    (
        "qwen3_next",
        RECURRENT,
        {"tensor_model_parallel_size": 3},
        "3, which does not divide the 4 key heads of the model's recurrent",
    ),
    (
        "nemotron_h",
        RECURRENT,
        {"tensor_model_parallel_size": 3},
        "3, which does not divide the 4 groups of heads of the model's recurr",
    ),
    (
        "gpt_oss",
        {},
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        "2, but the model's experts have biases",
    ),
]


@pytest.mark.parametrize(("family", "changes", "sizes", "said"), CANNOT)
def test_what_a_family_cannot_divide_is_refused_at_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str], family: str, changes: dict[str, Any], sizes: dict[str, int], said: str
) -> None:
    make_config(family, **changes).save_pretrained(folder / "model")
    words = [*DRY_RUN, "policy.model_name=model", "cluster.gpus_per_node=6", "policy.megatron_cfg.enabled=true"]
    words += [f"policy.megatron_cfg.{key}={size}" for key, size in sizes.items()]
    found = dry_run(capsys, "grpo", *words, "policy.megatron_cfg.sequence_parallel=true", code=2)
    assert f"policy.megatron_cfg.{list(sizes)[-1]}: found {said}" in found


@pytest.mark.parametrize("name", ["m", "m/iter_0000000"])
def test_a_folder_of_shards_is_refused_with_what_converts_it(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    iteration = folder / "m" / "iter_0000000"
    iteration.mkdir(parents=True)
    for file in (".metadata", "metadata.json"):
        (iteration / file).touch()
    (folder / "m" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    said = dry_run(capsys, "grpo", *DRY_RUN, f"policy.model_name={name}", code=2)
    assert f"strop export {name} FOLDER" in said


def test_megatron_core_keeps_float32_masters_of_bfloat16_weights(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["grpo", *DRY_RUN, "policy.device=auto", "policy.precision=bfloat16", "--assume-gpus", "8"]
    assert ", bfloat16, float32 masters\n" in dry_run(capsys, *run, f"{M}.enabled=true")


CASES: list[tuple[str, dict[str, Any], list[str], str]] = [
    # family, changes of its configuration, overrides, what is said
    ("llama", {"attention_bias": True}, [f"{M}.enabled=true"], "attention_bias and mlp_bias are not in Megatron Core's Llama"),
    ("qwen3_moe", {}, [f"{M}.enabled=true", f"{M}.moe_router_enable_expert_bias=true"],
     f"{M}.moe_router_enable_expert_bias: found true, but the model's weights have no such bias"),
    ("qwen3_moe", {}, [f"{M}.enabled=true", f"{M}.moe_token_dispatcher_type=flex"], "found flex, which needs DeepEP"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "words", "said"), CASES)
def test_a_model_that_a_run_refuses_once_it_is_loaded_is_refused_before(
    family: str, changes: dict[str, Any], words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(folder / "model", family, **changes)
    assert said in refuse(capsys, *RUN, "policy.model_name=model", "policy.device=cpu", *words)


@pytest.mark.slow
def test_a_model_that_fits_passes(folder: Path) -> None:
    write_config(folder / "model", "qwen3_moe")
    words = [*RUN, "policy.model_name=model", "policy.device=cpu", f"{M}.enabled=true"]
    assert cli.main(["grpo", *words, "--dry-run"]) == 0


def test_a_run_records_the_version_of_megatron_core() -> None:
    needs_megatron()
    assert find_versions()["megatron-core"]


SHAPE = ModelShape(name="m", layers=8, heads=12, key_value_heads=2)
EXPERTS = ModelShape(name="m", layers=8, heads=8, key_value_heads=4, experts=6)


def make(**sizes: Any) -> MegatronConfig:
    short = {
        "tensor": "tensor_model",
        "pipeline": "pipeline_model",
        "expert": "expert_model",
        "virtual": "virtual_pipeline_model",
    }
    names = {f"{name}_parallel_size" if (name := short.get(key, key)) in ("context", "expert_tensor", *short.values()) else key: key
             for key in sizes}  # fmt: skip
    return MegatronConfig(enabled=True, **{name: sizes[key] for name, key in names.items()})


def test_ranks_that_no_dimension_takes_read_other_data() -> None:
    dims = MegatronDims.from_config(make(tensor=2, pipeline=2, context=2, sequence_parallel=True), 16)
    assert dims == MegatronDims(tensor=2, pipeline=2, context=2, data=2, sequence=True) and dims.world_size == 16
    assert str(dims) == "Megatron Core, 2 data x 2 stages x 2 context x 2 tensor"


def test_experts_are_on_ranks_of_a_stage_whatever_the_others_are() -> None:
    dims = MegatronDims.from_config(make(tensor=2, pipeline=2, virtual=2, expert=4, expert_tensor=1), 16)
    assert (dims.data, dims.expert_data) == (4, 2)
    assert str(dims) == "Megatron Core, 4 data x 2 stages of 2 parts x 1 context x 2 tensor, experts 4 x 1 ways"


@pytest.mark.parametrize(
    ("sizes", "devices", "key"),
    [
        ({"tensor": 3}, 4, "tensor_model_parallel_size"),
        ({"pipeline": 3}, 4, "pipeline_model_parallel_size"),
        ({"tensor": 2, "context": 4}, 4, "tensor_model_parallel_size"),
        ({"expert": 8}, 4, "expert_model_parallel_size"),
        ({"pipeline": 2, "expert": 4}, 4, "expert_model_parallel_size"),
        ({"expert": 2, "expert_tensor": 4}, 4, "expert_model_parallel_size"),
    ],
)
def test_sizes_that_do_not_divide_the_devices_are_refused(sizes: dict[str, int], devices: int, key: str) -> None:
    (problem,) = make(**sizes).size_errors("policy.megatron_cfg", devices, uses_ray=True)
    assert problem.key == f"policy.megatron_cfg.{key}" and f"the {devices} devices that train" in problem.message
    with pytest.raises(ValueError, match=key):
        MegatronDims.from_config(make(**sizes), devices)


@pytest.mark.parametrize(
    ("sizes", "key", "text"),
    [
        ({"tensor": 5}, "tensor_model_parallel_size", "does not divide the 12 attention heads"),
        ({"tensor": 3}, "tensor_model_parallel_size", "cannot share the 2 key-value heads"),
        ({"pipeline": 3}, "pipeline_model_parallel_size", "3 stages cannot share the 8 layers"),
        ({"pipeline": 16}, "pipeline_model_parallel_size", "16 stages cannot share"),
        ({"pipeline": 4, "virtual": 4}, "pipeline_model_parallel_size", "4 stages of 4 parts each"),
        ({"pipeline": 4, "num_layers_in_first_pipeline_stage": 1}, "pipeline_model_parallel_size", "the 7 layers that"),
        (
            {"pipeline": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4},
            "pipeline_model_parallel_size",
            "have 7 of the 8 layers",
        ),
        (
            {"pipeline": 2, "virtual": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5},
            "num_layers_in_first_pipeline_stage",
            "found 3, which virtual_pipeline_model_parallel_size = 2 does not divide",
        ),
        ({"expert": 2}, "expert_model_parallel_size", "has no experts"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(sizes: dict[str, int], key: str, text: str) -> None:
    problem, *_ = model_errors(make(**sizes), "k", SHAPE)
    assert problem.key == f"k.{key}" and text in problem.message and problem.fix


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "context": 3, "pipeline": 4, "virtual": 2},
        {"tensor": 2, "context": 4},  # 6 heads on a rank: keys and values go around a ring
        {"context": 32},
        {"tensor": 4},  # more ranks than key-value heads
        {"pipeline": 3, "num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 3},
        {"pipeline": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5},
    ],
)
def test_sizes_that_divide_a_model_are_accepted(sizes: dict[str, int]) -> None:
    assert not list(model_errors(make(**sizes), "k", SHAPE))


def test_fewer_layers_than_stages_need_fewer_stages() -> None:
    (problem,) = model_errors(make(pipeline=16), "k", SHAPE)
    assert problem.fix == "Lower the number of stages."
    (problem,) = model_errors(make(pipeline=4, virtual=4), "k", SHAPE)
    assert problem.fix == "Lower the number of stages, or set k.virtual_pipeline_model_parallel_size=1."


def test_experts_need_sequence_parallelism_with_tensor_parallelism() -> None:
    (problem,) = model_errors(make(tensor=2, expert=2), "k", EXPERTS)
    assert problem.key == "k.sequence_parallel" and problem.fix == "Set it to true."


def test_experts_whose_gradients_would_not_be_added_are_refused() -> None:
    (problem,) = model_errors(make(tensor=2, sequence_parallel=True), "k", EXPERTS)
    assert problem.key == "k.expert_tensor_parallel_size" and problem.fix == "Set it to 2, or k.expert_model_parallel_size to 2."
    assert not list(model_errors(make(tensor=2, sequence_parallel=True, expert_tensor=2), "k", EXPERTS))
    assert not list(model_errors(make(tensor=2, sequence_parallel=True, expert=2), "k", EXPERTS))
    (problem,) = model_errors(make(expert=4), "k", EXPERTS)
    assert "does not divide the 6 experts of a layer" in problem.message


def test_the_shape_is_read_of_a_hugging_face_configuration() -> None:
    values = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 6}
    assert ModelShape.from_hf("m", {"text_config": values}) == ModelShape(
        name="m", layers=4, heads=8, key_value_heads=2, experts=6
    )
    latent = ModelShape.from_hf("m", {**values, "kv_lora_rank": 16})
    assert latent is not None and latent.key_value_heads == 8
    assert ModelShape.from_hf("m", {"hidden_size": 3}) is None


def test_training_in_fp8_says_what_it_needs() -> None:
    config = MegatronConfig(enabled=True, fp8_cfg=Fp8Config(enabled=True, fp8_recipe="mxfp8"))
    (problem,) = config.warnings("policy.megatron_cfg")
    assert "Transformer Engine and a Blackwell GPU" in problem.message


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_megatron.yaml")), ids=lambda path: path.stem)
def test_an_example_of_megatron_core_loads(path: Path) -> None:
    config = load_config(path, root=TRAINING_RUNS[section_of(path)]).config
    assert config.checkpointing.checkpoint_dir.startswith("results/")


@pytest.mark.parametrize("sizes", ["", " cluster.num_nodes=4 cluster.gpus_per_node=8"])
def test_a_documented_command_for_megatron_core_is_understood(sizes: str) -> None:
    understand(f"examples/run_grpo.py --config examples/configs/grpo_math_1B_megatron.yaml{sizes}", set())

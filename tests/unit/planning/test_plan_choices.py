"""The layouts that a plan chooses: each can be loaded, fits, and is not slower than the configured one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.build.dry_run.layout_overrides import list_overrides, read_space
from strop.build.dry_run.run_plan_inputs import read_inputs
from strop.cli.commands import main
from strop.config import GrpoRunConfig, load_config
from strop.config.load.load import find_training_root
from strop.hardware.devices import device_named
from strop.planning.layouts.choose_layout import MARGIN, rank_layouts
from strop.planning.layouts.layout_candidates import list_sizes
from strop.planning.make_plan import make_plan
from strop.planning.model_size import ModelSize
from strop.planning.plan_inputs import AverageLengths

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64}
QWEN_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936,
}  # fmt: skip
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=1",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.num_nodes=2",
    "policy.generation.colocated.resources.gpus_per_node=8",
)
CASES: dict[str, tuple[str, dict[str, Any], int, Sequence[str]]] = {
    "dense on a node": ("grpo_math_8B.yaml", LLAMA_8B, 8, ()),
    "dense on a thousand": ("grpo_math_8B.yaml", LLAMA_8B, 1024, ()),
    "steps ahead": ("grpo_math_8B.yaml", LLAMA_8B, 64, ASYNC),
    "experts": (
        "grpo_math_qwen30ba3b_megatron.yaml", QWEN_30B, 32,
        ("policy.megatron_cfg.pipeline_model_parallel_size=4", "policy.megatron_cfg.expert_model_parallel_size=4"),
    ),
    "what does not fit": ("grpo_math_70B_megatron.yaml", LLAMA_70B, 64, ()),
    "examples": ("sft.yaml", LLAMA_8B, 8, ()),
}  # fmt: skip


def cases(*quick: str) -> list[Any]:
    return [pytest.param(case, marks=() if case in quick else pytest.mark.exhaustive, id=case) for case in CASES]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write_config(values: dict[str, Any]) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return path

    return write_config


def plan(capsys: pytest.CaptureFixture[str], file: str, model: Path, devices: int, *more: str) -> dict[str, Any]:
    arguments = [
        "plan",
        str(CONFIGS / file),
        "--hardware",
        "h100",
        "--devices",
        str(devices),
        "--model-config",
        str(model),
        "--json",
    ]
    main([*arguments, *more])
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize("case", cases("dense on a node", "what does not fit"))
def test_each_choice_loads_fits_and_is_not_slower(capsys, write, case):
    file, values, devices, overrides = CASES[case]
    model = write(values)
    given = plan(capsys, file, model, devices, *overrides)

    assert given["choices"], given["verdict"]
    for choice in given["choices"]:
        chosen = plan(capsys, file, model, devices, *overrides, *choice["overrides"], "--no-choices")
        assert chosen["fits"]
        assert chosen["seconds"] == choice["seconds"]
        assert chosen["training_devices"] + chosen["generation_devices"] <= 2 * devices
        if given["fits"]:
            assert chosen["seconds"]["step"] < given["seconds"]["step"]


@pytest.mark.parametrize("case", cases("steps ahead"))
def test_the_search_plans_what_the_loaded_configuration_is_planned_as(case):
    file, values, devices, overrides = CASES[case]
    machines = [f"cluster.gpus_per_node={min(8, devices)}", f"cluster.num_nodes={max(1, devices // 8)}", *overrides]
    root = find_training_root({file.split("_")[0].removesuffix(".yaml"): {}})
    load = lambda more: load_config(CONFIGS / file, [*machines, *more], root=root, has_gpus=True, check=False).config  # noqa: E731
    model, device = ModelSize.from_config("model", values), device_named("h100")
    config = load(())
    inputs = read_inputs(config, model, device, AverageLengths())
    space = read_space(config, inputs)

    for ranked in rank_layouts(inputs, space)[:3]:
        changed = load(list_overrides(ranked.choice, space, config, model.num_layers))
        made = make_plan(read_inputs(changed, model, device, AverageLengths()))
        assert made.time.total == pytest.approx(ranked.seconds)
        assert all(phase.peak <= MARGIN * phase.limit for phase in made.phases)


@pytest.mark.parametrize("devices", [8, 48, 256])
@pytest.mark.parametrize("megatron", [False, True], ids=["torch", "megatron"])
@pytest.mark.parametrize("values", [LLAMA_8B, QWEN_30B], ids=["dense", "experts"])
def test_candidates_divide_devices_heads_and_experts(values, megatron, devices):
    file = "grpo_math_8B_megatron.yaml" if megatron else "grpo_math_8B.yaml"
    config = load_config(
        CONFIGS / file,
        ["cluster.gpus_per_node=8", f"cluster.num_nodes={devices // 8}"],
        root=GrpoRunConfig,
        has_gpus=True,
        check=False,
    ).config
    model = ModelSize.from_config("model", values)
    inputs = read_inputs(config, model, device_named("h100"), AverageLengths())
    found = list(list_sizes(inputs, read_space(config, inputs), devices))

    assert len(found) == len({(choice.sizes, choice.sequence) for choice in found}) > 3
    for choice in found:
        stage = devices // choice.stages
        assert devices % (choice.tensor * choice.context * choice.stages * choice.replicate) == 0
        assert model.heads % choice.tensor == 0
        assert stage % choice.expert == 0
        assert choice.expert == 1 or model.experts % choice.expert == 0
        sharding = choice.shard(devices, megatron=megatron)
        ranks = sharding.shards * sharding.optimizer_shards * sharding.replicate * sharding.tensor * sharding.stages
        assert ranks == devices


def test_stages_that_do_not_divide_the_layers_leave_the_rest_to_the_ends():
    """As DeepSeek-V3's 61 layers are cut in NeMo-RL's recipes."""
    config = load_config(
        CONFIGS / "grpo_math_8B_megatron.yaml", ["cluster.num_nodes=32"], root=GrpoRunConfig, has_gpus=True, check=False
    ).config
    model = ModelSize.from_config("model", LLAMA_8B)
    inputs = read_inputs(config, model, device_named("h100"), AverageLengths())
    space = read_space(config, inputs)

    for stages, ends in ((16, (3, 2)), (8, (7, 6))):
        choice = next(each for each in list_sizes(inputs, space, 256) if each.stages == 16)
        layout = space.given.__class__(
            split=space.given.split, learner=choice.__class__(stages=stages), engine=space.given.engine
        )
        overrides = list_overrides(layout, space, config, layers=61)
        for end, layers in zip(("first", "last"), ends, strict=True):
            assert f"policy.megatron_cfg.num_layers_in_{end}_pipeline_stage={layers}" in overrides


def test_one_device_has_nothing_to_divide(capsys, write):
    made = plan(capsys, "sft.yaml", write(LLAMA_8B | {"num_hidden_layers": 2}), 1)

    assert made["choices"] == []
    assert "one device trains: there is nothing to divide" in made["verdict"]


def test_the_table_has_what_to_paste(capsys, write):
    arguments = ["--hardware", "h100", "--devices", "64", "--model-config", str(write(LLAMA_8B))]

    assert main(["plan", str(CONFIGS / "grpo_math_8B.yaml"), *arguments]) == 0
    text = capsys.readouterr().out
    assert "\nchoose      1 takes" in text
    assert "\n  as given " in text
    assert "  1: policy." in text

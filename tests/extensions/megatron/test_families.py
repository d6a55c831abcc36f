"""What the families say of a configuration, and what they refuse."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.ranks import run_on_ranks

from strop.extensions.megatron.families.architecture import GATE, GATE_AND_UP, UP, PartsOrder, QkvOrder, find_rule, rotary_of
from strop.extensions.megatron.families.find_family import check_architecture, find_family
from strop.extensions.megatron.megatron_config import MegatronConfig, MegatronPeftConfig
from strop.models.value_network import draw_score_weight
from support.megatron_families import FAMILIES, make_config, make_model
from support.megatron_parity import MegatronCase, case, compared_alone, train_cases_on_rank
from support.megatron_stages import make_layout, start_layout
from support.needs import needs_megatron
from support.parity import MEGATRON, Differences, compare, make_batch, train
from support.sweep import sweep
from support.vision_models import make_vision_config, save_vision_model

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bias": ("llama", {"attention_bias": True}, "attention_bias"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic"),
    "activation": ("llama", {"hidden_act": "tanh"}, "hidden_act=tanh"),
    "bidirectional": ("gemma2", {"use_bidirectional_attention": True}, "not causal"),
    "unscaled": ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=false"),
    "groups": ("deepseek_v3", {"num_experts_per_tok": 4, "topk_group": 1}, "by its best two"),
    "group limited": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}, "topk_method"),
    "qwen 3 bias": ("qwen3", {"attention_bias": True}, "attention_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatrons_model_cannot_do_is_refused(name: str) -> None:
    family, changes, reason = REFUSED[name]
    hf_config = make_config(family, **changes)
    with pytest.raises(ValueError, match=reason):
        find_family(hf_config).architecture(hf_config)


def test_unknown_families_are_refused_with_the_known_ones() -> None:
    from transformers import DeepseekV4Config, GPT2Config

    with pytest.raises(ValueError, match=r"do not include gpt2; .*gemma3_text.*policy\.backend=torch trains any"):
        find_family(GPT2Config())
    with pytest.raises(ValueError, match="reads compressed keys"):
        find_family(DeepseekV4Config())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_has_a_rule(name: str) -> None:
    model = make_model(name, torch.float32)
    rules = {rule.name: rule for rule in find_family(model.config).rules(model.config)}
    for weight in model.state_dict():
        assert find_rule(rules, weight)


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2-yarn", "qwen3", "nemotron"])
def test_rotary_embeddings_are_those_of_transformers(name: str) -> None:
    model = make_model(name, torch.float32)
    theirs: Any = model.base_model.rotary_emb
    ours = rotary_of(model.config, getattr(model.config, "head_dim", None) or 8)
    assert torch.equal(ours.frequencies, theirs.inv_freq)
    assert ours.scale == theirs.attention_scaling


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_orders_place_each_row_once(ranks: int) -> None:
    heads, groups, size = 8, 2, 3
    for orders, rows in (
        ([QkvOrder(heads, groups, size, part) for part in range(3)], [heads * size, groups * size, groups * size]),
        (
            [QkvOrder(heads, groups, size, part, gated=True) for part in range(3)],
            [2 * heads * size, groups * size, groups * size],
        ),
        ([PartsOrder((8, 8, 16, 4), parts, 4) for parts in ((0, 1, 2), (3,))], [32, 4]),
        ([PartsOrder((1, 1), (0, 1), 12)], [24]),
        ([GATE, UP], [12, 12]),
        ([GATE_AND_UP], [24]),
    ):
        whole = [
            row
            for order, count in zip(orders, rows, strict=True)
            for piece in order.pieces(count, ranks)
            for row in range(piece.whole, piece.whole + piece.length)
        ]
        read = [row for piece in orders[0].pieces(rows[0], ranks) for row in range(rows[0])[piece.rows]]
        assert sorted(read) == list(range(rows[0]))
        assert sorted(whole) == list(range(orders[0].size(rows[0], ranks)))


def test_a_rank_has_its_part_of_gate_and_up() -> None:
    assert [piece.whole for piece in GATE.pieces(8, 2)] == [0, 8]
    assert [piece.whole for piece in UP.pieces(8, 2)] == [4, 12]


needs_megatron()
pytestmark = pytest.mark.slow

Sizes = dict[str, Any]
DENSE: dict[int, list[Sizes]] = {
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vp": 2}, {"cp": 2}],
    4: [{"tp": 2, "sp": True, "pp": 2}, {"tp": 4}, {"cp": 2, "tp": 2, "sp": True}],
}
MIXTURE: dict[int, list[Sizes]] = {
    2: [{"tp": 2, "sp": True, "etp": 2}, {"pp": 2}, {"pp": 2, "vp": 2}, {"cp": 2}, {"ep": 2}],
    4: [{"tp": 2, "sp": True, "ep": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, {"pp": 2, "ep": 2}, {"cp": 2, "ep": 4}],
}
BIASED = {world: [sizes for sizes in layouts if "etp" not in sizes] for world, layouts in MIXTURE.items()}
SHARED = {world: [sizes for sizes in layouts if "vp" not in sizes] for world, layouts in MIXTURE.items()}  # choices of indexers
BIASED[2].append({"tp": 2, "sp": True, "ep": 2})
MIXTURES = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v3-yarn", "glm4_moe", "gpt_oss"),
    *("qwen3_next", "qwen3_5_moe", "nemotron_h-moe", "deepseek_v32", "glm_moe_dsa"),
)
FLOAT64 = Differences(loss=2e-7, norm=2e-7, outputs=2e-7, weights=3e-8, metrics=3e-7)
ROUTED = Differences(loss=1e-6, norm=1e-6, outputs=1e-6, weights=3e-7, metrics=1e-6)  # weights of experts are float32
ROUTED_DELTA = replace(ROUTED, outputs=4e-6)  # whose rounding a delta rule amplifies


def measure(name: str, world: int) -> list[tuple[Sizes, Differences]]:
    """Return the differences of a family in each layout of ``world`` ranks."""
    names = make_model(name, torch.float32).state_dict()
    vectors = ("norm", "bias", "A_log", ".D", "sinks")  # which Megatron Core does not decay
    no_decay = [pattern for pattern in vectors if any(pattern in each for each in names)]
    # A delta rule and a choice of keys amplify the rounding of the first step: Megatron Core clips gradients by a float32 norm.
    steps = 1 if name.startswith(("qwen3_next", "qwen3_5", "glm_moe_dsa")) else 3
    trained = case(family=MEGATRON + name, branches=True, packed=name != "nemotron", no_decay=no_decay, steps=steps)
    batch = make_batch(trained)
    single = compared_alone(train(trained, batch))
    layouts = (SHARED if name == "glm_moe_dsa" else BIASED if name == "gpt_oss" else MIXTURE if name in MIXTURES else DENSE)[
        world
    ]
    cases = {str(sizes): (MegatronCase(case=trained, world=world, sizes=sizes), batch) for sizes in layouts}
    ranks = run_on_ranks(world, train_cases_on_rank, cases)
    return [(sizes, compare([rank[str(sizes)] for rank in ranks], single, len(batch.target))) for sizes in layouts]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", sweep(FAMILIES))
def test_a_family_trains_in_every_layout(name: str, world: int) -> None:
    delta = name.startswith(("qwen3_next", "qwen3_5"))
    bound = FLOAT64 if name not in MIXTURES else ROUTED_DELTA if delta else ROUTED
    for sizes, found in measure(name, world):
        for part in ("loss", "norm", "outputs", "weights", "metrics"):
            assert getattr(found, part) <= getattr(bound, part), (part, sizes, found)


needs_megatron()
CASES = ("mixtral", "qwen2", "deepseek_v3", "qwen3_next", "nemotron_h-moe", "gpt_oss")
LAYOUT = {"tp": 2, "sp": True, "etp": 2}
BIASED_LAYOUT = {"tp": 2, "sp": True, "ep": 2}


def test_a_checkpoint_goes_through_megatron_and_back_with_the_same_bytes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in CASES:  # each in several files, with the experts of a layer apart where the family's files have them so
        make_model(name, torch.bfloat16).save_pretrained(tmp_path / "new")
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "new", dtype=torch.bfloat16
        )  # a new model is split into other files
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
    assert any("block_sparse_moe.experts.0.w1" in name for name in _tensor_names(tmp_path / "mixtral"))
    results = run_on_ranks(2, convert, tmp_path)
    assert results[0] == results[1], "both ranks know the same shapes and data types"
    for name in CASES:
        before, after = tmp_path / name, tmp_path / f"{name}-after"
        assert _digests(before) == _digests(after), name


def convert(rank: int, folder: Path) -> list[Any]:
    """Read each model, write it again from what the ranks gather, and make critics of it. Return what the weights' metadata say."""
    from transformers import AutoModelForCausalLM

    from strop.extensions.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    described: list[Any] = []
    for name in CASES:
        exported, specs = _read(folder / name, make_config(name), BIASED_LAYOUT if name == "gpt_oss" else LAYOUT, "lm")
        described += specs
        if rank == 0:
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
            model.load_state_dict(exported)
            model.save_pretrained(folder / f"{name}-after", max_shard_size="20KB")
    exported, specs = _read(folder / "qwen2", make_config("qwen2"), {"pp": 2}, "scalar")
    assert list(exported)[-1] == "score.weight" and "lm_head.weight" not in exported
    score = exported["score.weight"]
    assert torch.equal(score, draw_score_weight(make_config("qwen2"), score.shape, 0, None).bfloat16())
    with pytest.raises(RuntimeError, match=r"fp8_cfg\.enabled needs Transformer Engine"):
        _read(folder / "qwen2", make_config("qwen2"), {"fp8_cfg": {"enabled": True}}, "lm")
    return described + specs


def _read(folder: Path, hf_config: Any, sizes: dict[str, Any], head: Any) -> tuple[dict[str, Any], list[Any]]:
    from strop.extensions.megatron.models.build_stages import build_stages
    from strop.extensions.megatron.weight_map import FileWeights, iter_weights, load_weights

    config = make_layout(**sizes)
    layout = start_layout(config)
    with layout.activate():
        stages = build_stages(hf_config, config, layout, dtype=torch.bfloat16, head=head)
        load_weights(stages, hf_config, FileWeights(folder))
        weights = list(iter_weights(stages, hf_config))
        exported = {weight.name: weight.gather() for weight in weights}
    return exported, [(weight.name, tuple(weight.spec.shape), str(weight.spec.dtype), weight.storage_key) for weight in weights]


def _tensor_names(folder: Path) -> list[str]:
    return [name for file in folder.glob("*.safetensors") for name in load_file(file)]


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("model*")}


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    from strop.extensions.megatron.weight_map import FileWeights

    with pytest.raises(FileNotFoundError, match="read from safetensors"):
        FileWeights(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_the_language_model_of_one_that_reads_images_is_trained_alone(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from strop.extensions.megatron.checkpoint.convert_megatron import convert_to_megatron
    from strop.extensions.megatron.checkpoint.hugging_face import read_hugging_face_weights
    from strop.extensions.megatron.checkpoint.torch_dist import ITERATION
    from strop.extensions.megatron.megatron_policy import find_model_files
    from strop.extensions.megatron.weight_map import FileWeights

    folder, values = save_vision_model(family, tmp_path / family), make_vision_config(family).to_dict()
    check_architecture(MegatronConfig(), str(folder), values)
    adapted = MegatronConfig(peft=MegatronPeftConfig(enabled=True))
    with pytest.raises(ValueError, match=r"peft\.enabled: found true, but Megatron Core trains the language model of"):
        check_architecture(adapted, str(folder), values)
    with pytest.warns(UserWarning, match="trains the language model of"):
        text = find_model_files(str(folder), {}).config
    read, stored = FileWeights(folder), load_file(folder / "model.safetensors")
    expected = {name: stored[read._stored[name]] for name in AutoModelForCausalLM.from_config(text).state_dict()}
    assert all("vision" not in name and "visual" not in name for name in read._stored if name in expected)
    convert_to_megatron(str(folder), tmp_path / "megatron")
    config = AutoConfig.from_pretrained(tmp_path / "megatron")
    assert config.model_type == text.model_type and config.architectures == text.architectures
    converted = read_hugging_face_weights(tmp_path / "megatron" / ITERATION, config)
    assert converted.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in converted.items())

"""What the families say of a configuration, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.extensions.megatron.families.find_family import find_family
from strop.extensions.megatron.families.rotary_frequencies import rotary_of
from strop.extensions.megatron.families.weight_rules import GatedOrder, QkvOrder
from support.megatron_families import FAMILIES, make_config, make_model

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
    from transformers import GPT2Config, NemotronHConfig

    with pytest.raises(ValueError, match=r"do not include gpt2; .*gemma3_text.*policy\.backend=torch trains any"):
        find_family(GPT2Config())
    with pytest.raises(ValueError, match="its Mamba layers"):
        find_family(NemotronHConfig())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_has_a_rule(name: str) -> None:
    model = make_model(name, torch.float32)
    rules = {rule.name for rule in find_family(model.config).rules(model.config)}
    names = {name if ".layers." not in name else "layers." + name.split(".", 3)[3] for name in model.state_dict()}
    assert names <= rules


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
        ([GatedOrder(0), GatedOrder(1)], [12, 12]),
        ([GatedOrder(None)], [24]),
    ):
        whole = [
            row
            for order, count in zip(orders, rows, strict=True)
            for piece in order.pieces(count, ranks)
            for row in range(piece.whole, piece.whole + piece.length)
        ]
        assert sorted(whole) == list(range(orders[0].size(rows[0], ranks)))


def test_a_rank_has_its_part_of_gate_and_up() -> None:
    assert [piece.whole for piece in GatedOrder(0).pieces(8, 2)] == [0, 8]
    assert [piece.whole for piece in GatedOrder(1).pieces(8, 2)] == [4, 12]

"""Experts out of the layouts of vLLM's kernels, without an engine."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.generation.vllm import weight_readback
from strop.generation.vllm.engine_weights import KeptSinks, map_names, rename_for_engine
from strop.generation.vllm.weight_readback import WeightShard, find_packing_order, read_experts, recover_log
from strop.models.checkpoint_names import CheckpointNames, describe_model
from strop.weight_sync.base import TensorFingerprint
from strop.weight_sync.fingerprints import combine_fingerprints, fingerprint
from strop.weight_sync.verification import VerificationFailed, verify_fingerprints

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 40
PADDED = 64


def shuffled(weight: Tensor) -> Tensor:
    """A kernel's layout: some permutation of an expert's elements."""
    order = torch.randperm(weight[0].numel(), generator=torch.Generator().manual_seed(0))
    return weight.reshape(len(weight), -1)[:, order].view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_a_kernel_is_found_by_packing_indices(dtype: torch.dtype) -> None:
    weight = torch.randn(1, 70, 1000).to(dtype)  # more elements than bfloat16 has integers
    order = find_packing_order((70, 1000), dtype, shuffled)
    assert torch.equal(weight.flatten()[order], shuffled(weight).flatten())


def test_a_kernel_that_does_more_than_move_weights_is_not_read() -> None:
    with pytest.raises(RuntimeError, match="does not store each weight exactly once"):
        find_packing_order((8, 8), torch.float32, lambda weight: weight.clamp(max=5))


def layer(gate_up: Tensor, down: Tensor, *, rank: int = 0, ranks: int = 1, expert_map: Tensor | None = None) -> Any:
    """What vLLM holds on one of ``ranks``: its part of each expert, padded with zeros, in the kernel's order."""
    size = INTERMEDIATE // ranks
    own = slice(rank * size, (rank + 1) * size)
    if expert_map is not None:
        held = [expert for expert, slot in enumerate(expert_map.tolist()) if slot >= 0]
        gate_up, down = gate_up[held], down[held]
    w13, w2 = gate_up.new_zeros(len(gate_up), 2 * PADDED, HIDDEN), down.new_zeros(len(down), HIDDEN, PADDED)
    w13[:, :size], w13[:, PADDED : PADDED + size] = gate_up[:, :INTERMEDIATE][:, own], gate_up[:, INTERMEDIATE:][:, own]
    w2[:, :, :size] = down[:, :, own]
    return SimpleNamespace(
        w13_weight=shuffled(w13),
        w2_weight=shuffled(w2),
        local_num_experts=len(gate_up),
        expert_map_manager=SimpleNamespace(expert_map=expert_map),
        moe_config=SimpleNamespace(
            intermediate_size=INTERMEDIATE,
            hidden_dim_unpadded=HIDDEN,
            has_bias=False,
            activation=SimpleNamespace(value="silu"),
            moe_parallel_config=SimpleNamespace(tp_size=ranks, tp_rank=rank),
        ),
    )


@pytest.fixture
def unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(packed: Tensor) -> Tensor:
        natural = torch.empty_like(packed).flatten()
        natural[find_packing_order(tuple(packed.shape), packed.dtype, shuffled)] = packed.flatten()
        return natural.view(packed.shape)

    monkeypatch.setattr(weight_readback, "_find_layout", lambda layer: unpack)


def fingerprints(held: Any) -> dict[str, list[TensorFingerprint]]:
    found: dict[str, list[TensorFingerprint]] = {}
    for shard in read_experts(held):
        value = fingerprint(shard.values[None], rows=shard.expert)
        found.setdefault(shard.name, []).append(TensorFingerprint(value, (shard.expert, 1, *shard.part)))
    return found


def verify(gate_up: Tensor, down: Tensor, holders: list[Any]) -> int:
    sent = {"gate_up_proj": gate_up, "down_proj": down}
    experts = {name: tuple(fingerprint(each[None], rows=n) for n, each in enumerate(tensor)) for name, tensor in sent.items()}
    held: dict[str, tuple[TensorFingerprint, ...]] = {}
    for holder in holders:
        for name, parts in fingerprints(holder).items():
            held[name] = (*held.get(name, ()), *parts)
    whole = {name: combine_fingerprints(parts) for name, parts in experts.items()}
    return verify_fingerprints("engine 0", whole, {}, held, experts=experts).verified


@pytest.mark.usefixtures("unpacking")
@pytest.mark.parametrize("cut", ["one process", "each expert over two", "experts over two", "experts alternate"])
def test_experts_add_up_to_what_was_sent_however_processes_share_them(cut: str) -> None:
    gate_up, down = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    maps = {"experts over two": ([0, 1, -1], [-1, -1, 0]), "experts alternate": ([0, -1, 1], [-1, 0, -1])}
    if cut in maps:
        holders = [layer(gate_up, down, expert_map=torch.tensor(each)) for each in maps[cut]]
    else:
        ranks = 2 if cut == "each expert over two" else 1
        holders = [layer(gate_up, down, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert verify(gate_up, down, holders) == 2
    assert torch.equal(
        sum(shard.values for each in holders for shard in read_experts(each) if shard.expert == 1 and shard.name == "down_proj"),
        down[1],
    )

    spoiled = down.clone()
    spoiled[1] = 0.5
    changed = [layer(gate_up, spoiled, ranks=len(holders))]
    if cut == "each expert over two":
        with pytest.raises(VerificationFailed, match="does not compute with the expert 1 of down_proj"):
            verify(gate_up, down, [*changed, holders[1]])
    with pytest.raises(VerificationFailed, match="does not compute with the expert"):
        verify(gate_up, down, holders[:-1] or [layer(gate_up + 1, down)])


def checkpoint_names(kind: str, **sizes: Any) -> CheckpointNames:
    """Those of a tiny model, of a configuration class of Transformers."""
    import transformers

    usual = {"hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    return CheckpointNames(describe_model(getattr(transformers, kind)(**usual, vocab_size=8, pad_token_id=0, **sizes)))


def test_mixtral_has_other_names_in_the_engine() -> None:
    names = checkpoint_names("MixtralConfig", num_local_experts=2, num_experts_per_tok=1)
    experts, gate, tensor = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate.weight", torch.randn(2, 6, 4)
    renamed = dict(rename_for_engine(torch.nn.Module(), [(experts, tensor), (gate, tensor[0, :2])], names))
    block = "model.layers.0.block_sparse_moe"
    assert torch.equal(renamed[f"{block}.experts.1.w3.weight"], tensor[1, 3:]) and len(renamed) == 5
    assert torch.equal(renamed[f"{block}.gate.weight"], tensor[0, :2])
    mapped = map_names(torch.nn.Module(), [experts, gate, "lm_head.weight"], names)
    assert mapped == {f"{block}.experts.gate_up_proj": experts, f"{block}.gate.weight": gate}


def test_mambas_layers_have_other_names_and_another_number_in_the_engine() -> None:
    from vllm.model_executor.models.falcon_h1 import FalconH1ForCausalLM

    mamba = {"mamba_n_heads": 1, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_ssm": 8}
    names, own = checkpoint_names("FalconH1Config", **mamba), "model.layers.0.mamba"
    engine = torch.nn.Module()
    engine.hf_to_vllm_mapper = FalconH1ForCausalLM.hf_to_vllm_mapper  # type: ignore[assignment]
    assert map_names(engine, [f"{own}.A_log", f"{own}.D", "model.layers.0.self_attn.q_proj.weight"], names) == {
        f"{own}.mamba.A": f"{own}.A_log",
        f"{own}.mamba.D": f"{own}.D",
    }
    log = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()
    held = WeightShard(f"{own}.A_log", -torch.exp(log[2:].float()), 2)
    assert torch.equal(recover_log(held, log).tensor, log[2:])
    changed = replace(held, tensor=held.tensor * 1.01)
    assert recover_log(changed, log) is changed


@pytest.mark.parametrize(
    ("loader", "singly"),
    [
        ("deepseek_v2.DeepseekV2Model", True),
        ("glm4_moe_lite.Glm4MoeLiteModel", True),
        ("hy_v3.HYV3Model", True),
        ("qwen3_moe.Qwen3MoeModel", False),
        ("glm4_moe.Glm4MoeModel", False),
        ("llama4.Llama4Model", False),
    ],
)
def test_experts_are_handed_over_singly_where_vllms_loader_knows_no_stacked_ones(loader: str, singly: bool) -> None:
    file, _, name = loader.partition(".")
    kind = getattr(importlib.import_module(f"vllm.model_executor.models.{file}"), name)
    model = torch.nn.Module()
    model.model = kind.__new__(kind)
    torch.nn.Module.__init__(model.model)
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    tensor = torch.randn(2, 6, 4)
    names = checkpoint_names("Qwen3MoeConfig", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=3)
    sent = dict(rename_for_engine(model, [(stacked, tensor)], names))
    if singly:
        assert torch.equal(sent["model.layers.1.mlp.experts.1.up_proj.weight"], tensor[1, 3:]) and len(sent) == 4
    else:
        assert list(sent) == [stacked]


def test_the_sinks_of_a_publish_are_copied_into_the_engine_since_its_reload_loses_them() -> None:
    model = type("GptOssForCausalLM", (torch.nn.Module,), {})()
    model.attn = torch.nn.Module()
    model.attn.sinks = torch.nn.Parameter(torch.zeros(2))
    kept = KeptSinks([("attn.sinks", torch.arange(4.0))])
    assert len(list(rename_for_engine(model, kept, CheckpointNames(None)))) == 1
    kept.copy_into(model, 1)
    assert model.attn.sinks.tolist() == [2.0, 3.0]

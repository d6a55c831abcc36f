"""Adapters of Megatron Core's layers become those of the Hugging Face model, or are merged into it, in one process without Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from extensions.megatron.checkpoint.test_convert_megatron import load_script, read_files, save_model
from strop.extensions.megatron.checkpoint.convert_megatron import convert_to_megatron
from strop.extensions.megatron.checkpoint.torch_dist import write_common
from strop.learner.parallel.shard_files import TensorShard, write_blocks
from strop.models.adapters import save_adapters
from strop.models.loading import load_model
from support.lora import with_random_adapters
from support.models import build

DIM, ALPHA = 3, 6


def convert(**options: Any) -> str | None:
    arguments = [
        part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value)) if value is not True
    ]
    arguments += [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
    answer: str | None = load_script("convert_lora_to_hf.py").main(arguments)
    return answer


def save_shards(folder: Path, model: Any) -> dict[str, Tensor]:
    """Save adapters on fused layers as Megatron Bridge does, all layers in one tensor. Returns these."""
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    rows = {
        "self_attention.linear_qkv": (config.num_attention_heads + 2 * config.num_key_value_heads) * head,
        "mlp.linear_fc1": 2 * config.intermediate_size,
        "mlp.linear_fc2": config.hidden_size,
    }
    columns = {"mlp.linear_fc2": config.intermediate_size}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in rows.items():
        for half, shape in (("in", (DIM, columns.get(name, config.hidden_size))), ("out", (size, DIM))):
            tensors[f"decoder.layers.{name}.adapter.linear_{half}.weight"] = torch.randn(
                config.num_hidden_layers, *shape, generator=generator
            )
    write_blocks(folder, [(name, TensorShard(each, (0, 0, 0), tuple(each.shape))) for name, each in tensors.items()], None)
    write_common(folder, {"iteration": 5})
    (folder / "run_config.yaml").write_text(f"peft: {{dim: {DIM}, alpha: {ALPHA}, target_modules: []}}\n")
    return tensors


def test_shards_of_fused_layers_become_those_of_their_parts(tmp_path: Path, tokenizer: Any) -> None:
    from peft import PeftModel

    base = save_model(tmp_path / "hf", "qwen2", tokenizer)
    model = build("qwen2")
    stored = save_shards(tmp_path / "iter_0000005", model)
    asked = {"adapter_ckpt": tmp_path / "iter_0000005", "hf_model_name": base}
    assert convert(**asked, hf_ckpt_path=tmp_path / "peft", adapter_only=True) is None
    assert convert(**asked, hf_ckpt_path=tmp_path / "merged") is None
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config, layer = model.config, "base_model.model.model.layers.1."
    qkv = [stored[f"decoder.layers.self_attention.linear_qkv.adapter.linear_{half}.weight"][1] for half in ("in", "out")]
    fc1 = [stored[f"decoder.layers.mlp.linear_fc1.adapter.linear_{half}.weight"][1] for half in ("in", "out")]
    head = config.hidden_size // config.num_attention_heads
    groups = qkv[1].unflatten(0, (config.num_key_value_heads, -1))  # of each group its queries, its key, its value
    parts = dict(zip("qkv", (groups[:, : -2 * head], groups[:, -2 * head : -head], groups[:, -head:]), strict=True))
    for name, up in parts.items():
        assert torch.equal(found[f"{layer}self_attn.{name}_proj.lora_B.weight"], up.flatten(0, 1))
        assert torch.equal(found[f"{layer}self_attn.{name}_proj.lora_A.weight"], qkv[0])
    for name, up in zip(("gate", "up"), fc1[1].chunk(2), strict=True):
        assert torch.equal(found[f"{layer}mlp.{name}_proj.lora_B.weight"], up)
        assert torch.equal(found[f"{layer}mlp.{name}_proj.lora_A.weight"], fc1[0])
    assert not any("o_proj" in name for name in found)
    merged = PeftModel.from_pretrained(load_model(str(base)), str(tmp_path / "peft")).merge_and_unload().state_dict()
    written = load_model(str(tmp_path / "merged")).state_dict()
    assert all(torch.equal(written[name], value) for name, value in merged.items())
    gate = build("qwen2").state_dict()["model.layers.1.mlp.gate_proj.weight"] + 2 * fc1[1].chunk(2)[0] @ fc1[0]
    torch.testing.assert_close(written["model.layers.1.mlp.gate_proj.weight"], gate)
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()


def test_a_checkpoint_of_a_run_is_merged_into_the_base_in_either_format(tmp_path: Path, tokenizer: Any) -> None:
    base = save_model(tmp_path / "hf", "llama", tokenizer)
    save_adapters(with_random_adapters(build("llama"), dim=DIM, base=str(base)), tmp_path / "weights")
    convert_to_megatron(str(base), tmp_path / "megatron")
    asked = {"adapter_ckpt": tmp_path / "weights", "hf_model_name": base}
    assert convert(**asked, hf_ckpt_path=tmp_path / "one") is None
    assert convert(**asked, hf_ckpt_path=tmp_path / "other", base_ckpt=tmp_path / "megatron" / "iter_0000000") is None
    assert read_files(tmp_path / "one") == read_files(tmp_path / "other")
    written, plain = (load_model(str(tmp_path / name)).state_dict() for name in ("one", "hf"))
    changed = {name for name, value in plain.items() if not torch.equal(written[name], value)}
    assert changed == {name for name in plain if "_proj" in name}

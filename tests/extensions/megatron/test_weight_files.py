"""Weights from and to files of Transformers: what is read by parts is equal to the byte when it is written again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strop.models.classifiers import draw_score_weight
from support.megatron_families import make_config, make_model
from support.megatron_stages import make_layout, start_layout
from support.needs import needs_megatron
from support.ranks import run_on_ranks

needs_megatron()
CASES = ("mixtral", "qwen2", "deepseek_v3")
LAYOUT = {"tp": 2, "sp": True, "etp": 2}


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
        exported, specs = _read(folder / name, make_config(name), LAYOUT, "lm")
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
    from strop.extensions.megatron.weights.shard_import import load_weights
    from strop.extensions.megatron.weights.stage_export import iter_weights
    from strop.extensions.megatron.weights.weight_reader import FileWeights

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
    from strop.extensions.megatron.weights.weight_reader import FileWeights

    with pytest.raises(FileNotFoundError, match="read from safetensors"):
        FileWeights(tmp_path)

"""Checkpoints of Megatron Core become Hugging Face folders and come from them, to the bit, in one process without Megatron."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from strop.checkpointing.saved_model import find_saved_model
from strop.extensions.export.convert import convert_model
from strop.extensions.megatron.checkpoint.convert_megatron import convert_to_megatron
from strop.learner.parallel.shard_files import TensorShard, write_shards
from strop.models.loading import ModelNotFound, load_model
from strop.models.network import Network
from strop.sampling import Sampling
from strop.user_code import import_attribute
from support.learners import make_torch_learner
from support.megatron_families import FAMILIES, make_model
from support.models import build
from support.sweep import sweep

CONVERTERS = Path(__file__).parents[4] / "examples" / "converters"


def load_script(name: str) -> ModuleType:
    return importlib.import_module(import_attribute(f"{CONVERTERS / name}:__name__"))


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def save_model(folder: Path, family: str, tokenizer: Any) -> Path:
    build(family).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Each kind of layer once: biases, norms of queries and keys, tied, latent attention, experts, shared experts, gates of one matrix.
KEPT = ("qwen2", "gemma3", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("family", sweep(FAMILIES, *KEPT))
def test_there_and_back_are_the_same_bytes(tmp_path: Path, tokenizer: Any, family: str) -> None:
    source = tmp_path / "hf"
    make_model(family, torch.bfloat16).save_pretrained(source)
    tokenizer.save_pretrained(source)
    convert_to_megatron(str(source), tmp_path / "megatron")
    assert (tmp_path / "megatron" / "iter_0000000" / "metadata.json").is_file()
    convert_model(find_saved_model(tmp_path / "megatron"), tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)


def test_what_is_no_checkpoint_of_megatron_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    answer = load_script("convert_megatron_to_hf.py").main(
        ["--megatron-ckpt-path", str(tmp_path), "--hf-ckpt-path", str(tmp_path / "hf")]
    )
    assert "no checkpoint of Megatron Core" in answer and "folders there: weights" in answer


def test_weights_of_another_model_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    save_model(tmp_path / "hf", "llama", tokenizer)
    convert_to_megatron(str(tmp_path / "hf"), tmp_path / "megatron")
    path = tmp_path / "megatron" / "config.json"
    config = json.loads(path.read_text())
    for change in ({"num_hidden_layers": config["num_hidden_layers"] + 1}, {"vocab_size": 9999}, {"intermediate_size": 8}):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match="another model"):
            convert_model(find_saved_model(tmp_path / "megatron"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_run_of_the_torch_learner_says_how_to_use_it(tmp_path: Path, tokenizer: Any) -> None:
    save_model(tmp_path / "hf", "llama", tokenizer)
    convert_to_megatron(str(tmp_path / "hf"), tmp_path / "policy" / "weights")
    with pytest.raises(ModelNotFound, match=r"checkpoint of Megatron Core; convert it first: strop export"):
        load_model(str(tmp_path / "policy" / "weights"))
    optimizer = tmp_path / "policy" / "optimizer"
    write_shards(optimizer, {"optimizer.state.exp_avg.a": TensorShard(torch.ones(2), (0,), (2,))}, None)
    learner = make_torch_learner(Network(build("llama"), precision=torch.float32), Sampling())
    with pytest.raises(ValueError, match=r"saved by Megatron Core.*megatron_cfg.enabled=true"):
        learner.load(tmp_path / "policy")

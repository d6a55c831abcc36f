"""Shards of several ranks, written in Hugging Face's format."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from strop import Run
from strop.learner.parallel.shard_files import TensorShard, write_shards
from strop.learner.parallel.sharded_checkpoint import take_snapshot
from strop.models.loading import ModelNotFound, load_model
from strop.models.network import Network
from strop.sampling import Sampling
from strop.user_code import import_attribute
from support.learners import make_torch_learner
from support.models import build
from support.saved_runs import save_run

SCRIPT = Path(__file__).parents[3] / "examples" / "converters" / "convert_dcp_to_hf.py"


def test_the_model_of_a_run_of_many_ranks_loads_in_transformers(tmp_path: Path, tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = Run(save_run(tmp_path, tiny_model_folder, "shards", steps=(4,)))
    assert run.model == run.folder / "exported" / "step_4" and AutoModelForCausalLM.from_pretrained(run.model)
    written = run.model.stat().st_mtime_ns
    assert run.model.stat().st_mtime_ns == written, "it is converted once"
    assert (run.export(tmp_path / "out", dtype="bfloat16") / "README.md").exists()


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module(import_attribute(f"{SCRIPT}:__name__"))


def saved(folder: Path, family: str, tokenizer: Any) -> dict[str, Tensor]:
    """A checkpoint as ranks write it (here one has it all), with its tokenizer; and the model's weights."""
    model = build(family)
    learner = make_torch_learner(Network(model, precision=torch.float32), Sampling(), average_decay=0.9)
    take_snapshot(learner.parallelism, learner.state, copies=False).save(folder / "policy")
    for name in ("weights", "ema"):
        tokenizer.save_pretrained(folder / "policy" / name)
    (folder / "config.yaml").write_text("policy:\n  model_name: nowhere/at-all\n")
    return dict(model.state_dict())


def convert(script: ModuleType, folder: Path, target: Path, weights: str = "policy/weights") -> str | None:
    arguments = ["--config", folder / "config.yaml", "--dcp-ckpt-path", folder / weights, "--hf-ckpt-path", target]
    answer: str | None = script.main([str(argument) for argument in arguments])
    return answer


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["policy/weights", "policy/ema"])
def test_the_folder_has_the_weights_to_the_bit_and_the_tokenizer(
    script: ModuleType, tmp_path: Path, tokenizer: Any, family: str, weights: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wanted = saved(tmp_path, family, tokenizer)
    assert convert(script, tmp_path, tmp_path / "hf", weights) is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items())
    text = "What is 3 + 4?"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text).input_ids == tokenizer(text).input_ids
    assert not list((tmp_path / "hf").glob("*.distcp")) and not (tmp_path / "hf" / ".metadata").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "hf", "policy"]


def test_a_model_in_bfloat16_stays_in_it(script: ModuleType, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = build("llama").bfloat16()
    learner = make_torch_learner(Network(model, precision=torch.bfloat16), Sampling())
    take_snapshot(learner.parallelism, learner.state, copies=False).save(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy" / "weights")
    (tmp_path / "config.yaml").write_text("{}")
    assert convert(script, tmp_path, tmp_path / "hf") is None
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_what_cannot_be_converted_is_refused_with_a_reason(script: ModuleType, tmp_path: Path, tokenizer: Any) -> None:
    saved(tmp_path, "llama", tokenizer)
    target = tmp_path / "hf"
    assert "there is no folder" in str(convert(script, tmp_path, target, "weights"))
    assert f"name {tmp_path / 'policy' / 'weights'}" in str(convert(script, tmp_path, target, "policy"))
    whole = tmp_path / "whole"
    build("llama").save_pretrained(whole)
    assert "is a Hugging Face folder already" in str(convert(script, tmp_path, target, "whole"))
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    said = str(convert(script, tmp_path, target, "adapters"))
    assert f"strop export {adapters} {target} --merge" in said
    (tmp_path / "half").mkdir()
    assert "it has no .metadata" in str(convert(script, tmp_path, target, "half"))
    assert "already exists" in str(convert(script, tmp_path, whole))
    assert "there is no file" in str(convert(script, tmp_path / "policy", target, "weights"))
    assert not target.exists()


def test_weights_of_another_model_than_its_configuration_are_refused(script: ModuleType, tmp_path: Path, tokenizer: Any) -> None:
    saved(tmp_path, "llama", tokenizer)
    write_shards(tmp_path / "policy" / "weights", {"odd": TensorShard(torch.ones(2), (0,), (2,))}, None)
    said = str(convert(script, tmp_path, tmp_path / "hf"))
    assert "do not fit LlamaForCausalLM" in said and "unexpected odd" in said
    assert not (tmp_path / "hf").exists()


def test_pieces_named_as_a_model_say_how_to_make_one_of_them(tmp_path: Path, tokenizer: Any) -> None:
    saved(tmp_path, "llama", tokenizer)
    with pytest.raises(ModelNotFound, match=r"convert them first: strop export"):
        load_model(str(tmp_path / "policy" / "weights"))


def test_pieces_without_a_configuration_take_the_runs(script: ModuleType, tmp_path: Path, tokenizer: Any) -> None:
    saved(tmp_path, "llama", tokenizer)
    base = tmp_path / "base"
    build("llama").save_pretrained(base)
    tokenizer.save_pretrained(base)
    for path in (tmp_path / "policy" / "weights").iterdir():
        if path.suffix != ".distcp" and path.name != ".metadata":
            path.unlink()
    assert "name the run's config.yaml" in str(
        script.main(["--dcp-ckpt-path", str(tmp_path / "policy/weights"), "--hf-ckpt-path", "x"])
    )
    (tmp_path / "config.yaml").write_text(f"policy:\n  model_name: {base}\n")
    assert convert(script, tmp_path, tmp_path / "hf") is None
    assert (tmp_path / "hf" / "tokenizer_config.json").exists()

"""What cannot be exported is refused before anything is written, and no code of a folder runs."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop import cli
from strop.checkpointing.saved_model import SavedModel, find_saved_model
from strop.extensions.export.convert import convert_model, convert_shards
from strop.extensions.export.model_folder import ConversionError, load_saved_model
from strop.learner.parallel.shard_files import TensorShard, write_shards
from strop.models.adapters import WEIGHTS_FILE
from strop.models.checkpoint_names import load_model_config
from strop.models.loading import RemoteCodeRefused
from support.models import build

UP = r"model\.layers\.1\.mlp\.up_proj"


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_damaged_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    cut_off(tmp_path / "model" / "model.safetensors")
    assert cli.main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    assert "model.safetensors cannot be read" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_damaged_adapters_are_named(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    cut_off(tmp_path / "adapters" / WEIGHTS_FILE)
    with pytest.raises(ConversionError, match=f"{WEIGHTS_FILE} cannot be read"):
        convert_model(SavedModel(str(tmp_path / "adapters")), tmp_path / "out")


@pytest.mark.parametrize("fault", ["missing", "infinite values"])
def test_weights_that_do_not_fit_are_refused(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "layers.1.mlp.up_proj" in name)
    changed = {each: tensor for each, tensor in weights.items() if each != name}
    if fault != "missing":
        changed[name] = torch.full_like(weights[name], float("nan"))
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (load_saved_model, lambda model: convert_model(find_saved_model(model), tmp_path / "exported")):
        with pytest.raises(ValueError, match=f"{fault} {UP}"):
            load(str(folder))


def test_code_of_a_model_is_not_run_for_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise RuntimeError('it ran')\n")
    config = {"model_type": "own-model", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RemoteCodeRefused, match=r"contains its own Python code.*policy\.trust_remote_code=true"):
        load_model_config(str(tmp_path))


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_crafted_shards_run_no_code(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", {"a": TensorShard(torch.arange(6.0).view(2, 3), (0, 0), (2, 3))}, None)
    metadata = tmp_path / "shards" / ".metadata"
    whole: Any = pickle.loads(metadata.read_bytes())
    whole.planner_data = RunsCode(tmp_path / "ran")
    metadata.write_bytes(pickle.dumps(whole))
    build("llama").config.save_pretrained(tmp_path / "shards")
    with pytest.raises(ConversionError, match="could run code"):
        convert_shards(tmp_path / "shards", tmp_path / "out")
    assert not (tmp_path / "ran").exists()

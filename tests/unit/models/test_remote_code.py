"""The Python code that a model brings runs only if the user asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.models.checkpoint_names import CheckpointNames
from strop.models.loading import RemoteCodeRefused, load_model, load_tokenizer, model_from_config
from strop.models.value_network import load_classifier
from strop.safety.remote_code import trust_remote_code, trusts_remote_code


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise RuntimeError('it ran')\n")
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "own-model", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": classes}))
    return folder


LOADERS: list[Callable[[str], Any]] = [
    load_model,
    load_classifier,
    load_tokenizer,
    lambda name: model_from_config(Path(name)),
]


@pytest.mark.parametrize("load", LOADERS, ids=["model", "classifier", "tokenizer", "from_config"])
def test_code_of_a_model_is_refused_with_the_key_to_set(load: Callable[[str], Any], foreign: Path) -> None:
    with pytest.raises(RemoteCodeRefused, match=r"foreign contains its own Python code.*policy\.trust_remote_code=true"):
        load(str(foreign))
    assert not (foreign.parent / "ran").exists()


@pytest.mark.parametrize("load", LOADERS, ids=["model", "classifier", "tokenizer", "from_config"])
def test_code_of_a_model_runs_if_it_is_trusted(
    load: Callable[[str], Any], foreign: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with trust_remote_code(True), pytest.raises(RuntimeError, match="it ran"):
        load(str(foreign))
    assert (foreign.parent / "ran").exists() and not trusts_remote_code()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_model_with_its_own_code_has_its_own_names_in_checkpoints(
    trusted: bool, foreign: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (foreign / "own.py").write_text(
        "from transformers import PretrainedConfig\nclass Config(PretrainedConfig):\n    model_type = 'own-model'\n"
    )
    with trust_remote_code(trusted):
        names = CheckpointNames.of(str(foreign))
    weight = torch.zeros(2)
    assert names.stored_names("own.weight") == ["own.weight"] and dict(names.convert("own.weight", weight)) == {
        "own.weight": weight
    }

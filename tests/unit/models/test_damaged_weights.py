"""Files of weights that cannot be read end a command with their name, what is wrong, and what to do; never with a traceback."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strop.models.adapters import WEIGHTS_FILE, merge_adapters
from strop.models.load_report import DamagedWeights
from strop.models.loading import load_model
from strop.models.value_network import load_classifier
from support.models import build
from support.sweep import one_in

BIN, SAFE, INDEX = "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 123\n"


class Hostile:
    """What runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile_was_here",)


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in build("llama").state_dict().items()}


def folder(root: Path) -> Path:
    """A model's folder without its weights."""
    build("llama").save_pretrained(root)
    (root / SAFE).unlink()
    return root


def save(path: Path, content: object, **options: bool) -> None:
    torch.save(content, path, **options)  # type: ignore[arg-type]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(value ^ 0xFF for value in content[200:400])
    path.write_bytes(bytes(content))


def safe(path: Path) -> None:
    build("llama").save_pretrained(path.parent)


def list_missing(path: Path) -> None:
    names = dict.fromkeys(tensors(), "model-00001-of-00002.safetensors")
    path.write_text(json.dumps({"metadata": {}, "weight_map": names}))


DAMAGED: dict[str, tuple[str, tuple[Callable[[Path], object], ...], str]] = {
    "a program": (BIN, (lambda path: save(path, {**tensors(), "x": Hostile()}),), r"Python objects besides tensors \(\w+\.system\)"),
    "a program, the old format": (
        BIN,
        (lambda path: save(path, {**tensors(), "x": Hostile()}, _use_new_zipfile_serialization=False),),
        r"Python objects besides tensors \(\w+\.system\)",
    ),
    "a bare pickle": (BIN, (lambda path: path.write_bytes(pickle.dumps(Hostile())),), "damaged, or it was cut off"),
    "a whole model": (BIN, (lambda path: save(path, build("llama")),), r"Python objects besides tensors \(.*LlamaForCausalLM\)"),
    "a list": (BIN, (lambda path: save(path, [1, 2]),), "it holds a list in place of tensors"),
    "numbers": (BIN, (lambda path: save(path, dict.fromkeys(tensors(), 1)),), "its entry '.*weight' is of type int"),
    "cut off": (BIN, (lambda path: save(path, tensors()), cut), "damaged, or it was cut off"),
    "flipped bits": (BIN, (lambda path: save(path, tensors()), flip), "damaged, or it was cut off"),
    "empty": (BIN, (lambda path: path.touch(),), "it is empty"),
    "a web page": (BIN, (lambda path: path.write_text("<html>404</html>"),), "damaged, or it was cut off"),
    "a pointer": (BIN, (lambda path: path.write_text(POINTER),), "git lfs pull"),
    "safetensors, cut off": (SAFE, (safe, cut), "damaged, or it was cut off"),
    "safetensors, a pointer": (SAFE, (lambda path: path.write_text(POINTER),), "git lfs pull"),
    "safetensors, empty": (SAFE, (lambda path: path.touch(),), "it is empty"),
    "an index without its files": (INDEX, (list_missing,), r"model-00001-of-00002.safetensors cannot be read: .* is missing"),
    "an index that is none": (INDEX, (lambda path: path.write_text("{nope"),), "damaged, or it was cut off"),
}  # fmt: skip


@pytest.mark.parametrize("kind", one_in(4, DAMAGED))
def test_damaged_weights_are_named_by_every_load(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, steps, said = DAMAGED[kind]
    source = folder(tmp_path / "model")
    for write in steps:
        write(source / name)
    monkeypatch.chdir(tmp_path)
    for load in (load_model, load_classifier):
        with pytest.raises(DamagedWeights, match=said) as found:
            load(str(source))
        assert str(source) in str(found.value)
    assert not (tmp_path / "hostile_was_here").exists()


def test_adapters_are_named_too(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    cut(tmp_path / "adapters" / WEIGHTS_FILE)
    with pytest.raises(DamagedWeights, match=f"{WEIGHTS_FILE} cannot be read"):
        merge_adapters(build("llama"), tmp_path / "adapters")


def test_an_error_that_is_none_of_the_weights_stays_what_it_is(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "good")
    shutil.copy(tmp_path / "good" / "config.json", tmp_path / "good" / "kept.json")
    config = json.loads((tmp_path / "good/config.json").read_text())
    (tmp_path / "good/config.json").write_text(json.dumps({**config, "hidden_act": "no such function"}))
    with pytest.raises(KeyError, match="no such function"):
        load_model(str(tmp_path / "good"))

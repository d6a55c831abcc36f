"""``strop serve --tinker``: what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import cli, packages


def test_the_tinker_service_wants_the_sdk_and_the_torch_engine(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", str(tiny_model_folder), "--tinker", "--engine", "vllm"]) == 1
    assert "--tinker trains and samples with the torch engine; leave out --engine vllm" in capsys.readouterr().err
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "tinker")
    assert cli.main(["serve", str(tiny_model_folder), "--tinker"]) == 1
    assert "pip install -e '.[tinker]'" in capsys.readouterr().err

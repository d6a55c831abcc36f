"""The folders of a run before its models load, and what its checkpoints need."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.runs import overrides, tiny_config
from loop.tiny import build_tiny
from strop.config import TRAINING_RUNS, TrainingRunConfig, load_config
from strop.learner.client import InlineCaller, LearnerClient
from strop.models.loading import load_model
from strop.models.network import Network
from strop.monitoring.trackers.base import NullTracker
from strop.runs.exit_codes import run_command
from strop.runs.run_folders import _checkpoint_bytes, _estimate_checkpoint, check_checkpoint_space, lock_run_folders
from strop.sampling import Sampling
from strop.storage.files import StorageError
from strop.storage.folder_lock import FolderLocked
from support.learners import make_torch_learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingRunConfig:
    monkeypatch.chdir(tmp_path)
    loaded: TrainingRunConfig = load_config(None, overrides(tiny_config(model)), root=TRAINING_RUNS["grpo"]).config
    return loaded


class Notes(NullTracker):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_second_run_of_the_same_process_is_refused(config: TrainingRunConfig, tmp_path: Path) -> None:
    said = r"^logger\.log_dir: logs is in use by another run of this process.*run_name"
    with lock_run_folders(config), pytest.raises(FolderLocked, match=said), lock_run_folders(config):
        pass
    assert not list((tmp_path / "logs").iterdir()) and not list((tmp_path / "results").iterdir())


def test_the_weights_of_a_checkpoint_are_known_before_the_model_loads(config: TrainingRunConfig, model: Path) -> None:
    parameters = {id(parameter): parameter.numel() for parameter in load_model(str(model)).parameters()}
    assert _estimate_checkpoint(config) == 4 * sum(parameters.values())


def test_a_disk_that_is_too_small_is_refused_before_the_model_loads(
    config: TrainingRunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("strop.storage.folder_lock.free_bytes", lambda _: 1000)
    said = r"^checkpointing\.checkpoint_dir: results has 1\.0 kB free, and one checkpoint needs "
    with pytest.raises(StorageError, match=said), lock_run_folders(config):
        pass
    assert list(tmp_path.iterdir()) == [], "folders that were made are removed"


def test_with_the_models_the_size_of_a_checkpoint_is_known(
    config: TrainingRunConfig, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    learner = make_torch_learner(Network(load_model(str(model)), packed=True), Sampling())
    for parameter in learner.parameters:
        parameter.grad = torch.ones_like(parameter)
    learner.step()
    learner.save(tmp_path / "saved")
    client = LearnerClient(InlineCaller(learner))
    saved = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert 0.8 * saved < _checkpoint_bytes(client, optimizer=True) <= saved
    notes = Notes()
    check_checkpoint_space(config, {"policy": client}, notes)
    assert notes.texts == []
    for module in ("strop.runs.run_folders", "strop.storage.folder_lock"):
        monkeypatch.setattr(f"{module}.free_bytes", lambda _: 2 * saved)
    check_checkpoint_space(config, {"policy": client}, notes)
    assert "3 more checkpoints (checkpointing.keep_top_k=1, the newest, and the one being written) need" in notes.texts[0]
    monkeypatch.setattr("strop.storage.folder_lock.free_bytes", lambda _: saved // 2)
    with pytest.raises(StorageError, match="one checkpoint needs"):
        check_checkpoint_space(config, {"policy": client}, notes)


@pytest.mark.parametrize(("error", "said"), [(TimeoutError(), "TimeoutError"), (OSError("no room"), "no room")])
def test_an_error_without_words_is_named_by_its_kind(capsys: pytest.CaptureFixture[str], error: Exception, said: str) -> None:
    async def fail() -> None:
        raise error

    assert run_command(fail()) == 1
    assert capsys.readouterr().err == f"error: {said}\n"

"""TensorBoard and Weights & Biases, without a network."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loop.runs import Environ, grpo
from strop import packages
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.extensions.trackers.tensorboard import TensorBoardTracker
from strop.extensions.trackers.wandb import ID_FILE, WandbTracker
from strop.runs.lifecycle import make_tracker
from strop.runs.train import make_closing
from strop.trainer.listeners import Listeners


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_gets_the_names_of_other_libraries_too_if_they_are_asked_for(tmp_path: Path) -> None:
    for aliases in (False, True):
        tracker = TensorBoardTracker(tmp_path / str(aliases), aliases=aliases)
        tracker.log(1, {"train/groups_without_signal": 0.25})
        tracker.close()
    assert scalars(tmp_path / "True", "train/frac_reward_zero_std") == [(1, 0.25)]
    assert scalars(tmp_path / "True", "train/groups_without_signal") == [(1, 0.25)]
    with pytest.raises(KeyError):
        scalars(tmp_path / "False", "train/frac_reward_zero_std")


def test_tensorboard_forgets_the_steps_that_run_again_also_after_a_cut_file(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in range(1, 6):
        first.log(step, {"train/reward": 0.0})
    first.close()
    (events,) = tmp_path.iterdir()
    events.write_bytes(events.read_bytes()[:-5])  # what a kill leaves
    second = TensorBoardTracker(tmp_path)
    second.resume(3)
    second.log(4, {"train/reward": 1.0})
    second.close()
    assert scalars(tmp_path, "train/reward") == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]


def test_a_missing_package_is_an_error_that_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"logger\.tensorboard_enabled=false"):
        TensorBoardTracker(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"logger\.wandb_enabled=false"):
        WandbTracker(tmp_path, project="test")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_wandb_works_offline_and_keeps_its_run_when_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in ((1, 2), (3,)):
        tracker = WandbTracker(tmp_path, project="test", name="run", config={"grpo": {"seed": 42}})
        tracker.resume(steps[0] - 1)
        for step in steps:
            tracker.log(step, {"train/reward": 0.5})
        tracker.close()
    run_id = (tmp_path / ID_FILE).read_text().strip()
    folders = [path for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run-")]
    assert folders and all(run_id in folder.name for folder in folders)  # a second one in the same second ends in -1
    assert all(list(folder.glob("*.wandb")) for folder in folders)


class FakeWandb(SimpleNamespace):
    """Stands for the service: remembers what ``init`` was asked, and may refuse to rewind."""

    def __init__(self, *, rewinds: bool = True, key: str | None = "key") -> None:
        super().__init__(api=SimpleNamespace(api_key=key), Settings=lambda **options: options)
        self.rewinds = rewinds
        self.asked: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def init(self, **options: Any) -> Any:
        self.asked.append(options)
        if "resume_from" in options and not self.rewinds:
            raise RuntimeError("rewind is not enabled")
        return SimpleNamespace(log=lambda metrics, step: self.logged.append((step, metrics)), finish=lambda: None)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)


def run_twice(folder: Path) -> None:
    for start in (0, 3):
        tracker = WandbTracker(folder, project="test", entity="team")
        tracker.resume(start)
        tracker.log(start + 1, {"train/loss": 1.0})
        tracker.close()


@pytest.mark.usefixtures("online")
def test_wandb_is_rewound_to_where_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", service)
    run_twice(tmp_path)
    first, second = service.asked
    assert second["resume_from"] == f"{first['id']}?_step=3" and "id" not in second
    assert first["entity"] == "team" and first["project"] == "test"
    assert [step for step, _ in service.logged] == [1, 4]


@pytest.mark.usefixtures("online")
def test_a_run_that_starts_from_nothing_in_a_used_folder_is_a_new_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", service)
    for _ in range(2):
        tracker = WandbTracker(tmp_path, project="test")
        tracker.resume(-1)
        tracker.close()
    assert service.asked[0]["id"] != service.asked[1]["id"]


@pytest.mark.usefixtures("online")
def test_wandb_prints_no_summary_among_the_last_lines_of_a_run_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.delenv("WANDB_QUIET", raising=False)
    for wanted in ({"console": "off", "quiet": True}, {"console": "off"}):
        tracker = WandbTracker(tmp_path, project="test")
        tracker.resume(-1)
        tracker.close()
        assert service.asked[-1]["settings"] == wanted
        monkeypatch.setenv("WANDB_QUIET", "false")


@pytest.mark.usefixtures("online")
def test_wandb_that_cannot_rewind_continues_the_run_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = FakeWandb(rewinds=False)
    monkeypatch.setitem(sys.modules, "wandb", service)
    with caplog.at_level(logging.WARNING):
        run_twice(tmp_path)
    assert service.asked[2]["id"] == service.asked[0]["id"] and service.asked[2]["resume"] == "allow"
    assert "could not rewind" in caplog.text


@pytest.mark.usefixtures("online")
def test_wandb_without_a_key_says_so_instead_of_asking_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(key=None))
    with pytest.raises(ValueError, match="WANDB_MODE=offline"):
        WandbTracker(tmp_path, project="test")


@pytest.mark.usefixtures("online")
def test_the_configured_project_and_team_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", service)
    keys = ("wandb_enabled=true", "wandb.project=adding", "wandb.entity=team", f"log_dir={tmp_path}", "console=none")
    overrides = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", *(f"logger.{key}" for key in keys)]
    tracker = make_tracker(load_config(None, overrides, root=GrpoRunConfig, check=False).config)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert service.asked[0]["entity"] == "team" and service.asked[0]["project"] == "adding"


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    for name in ("wandb", "tensorboard"):
        with pytest.raises(ConfigError, match=f"{name} is not installed"):
            load_config(None, ["policy.model_name=m", "env.arithmetic={}", f"logger.{name}_enabled=true"], root=GrpoRunConfig)


@pytest.mark.parametrize(("mode", "said"), [("offline", True), ("online", False)])
def test_a_run_whose_tracker_sends_nothing_says_how_to_send_it_later(
    mode: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    keys = ["policy.model_name=m", "env.arithmetic={}", "logger.wandb_enabled=true", "logger.log_dir=logs/x"]
    config = load_config(None, keys, root=GrpoRunConfig, check=False).config
    run: Any = SimpleNamespace(last_metrics={}, listeners=Listeners())
    assert ("wandb sync logs/x/wandb/offline-run-*" in str(make_closing(config, run, [], 1.0))) == said


@pytest.mark.slow
def test_a_run_leaves_tensorboard_events_and_an_offline_run_of_weights_and_biases(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    keys = {"logger.tensorboard_enabled": True, "logger.wandb_enabled": True, "grpo.max_num_steps": 2, "logger.console": "plain"}
    outcome = grpo(tiny_model_folder, tmp_path, before=Environ({"WANDB_MODE": "offline", "WANDB_SILENT": "true"}), **keys)
    text = outcome.out + outcome.err
    assert outcome.code == 0, text
    assert "wandb sync logs/wandb/offline-run-*" in text and "off for the rest of this run" not in text
    assert [step for step, _ in scalars(tmp_path / "logs" / "tensorboard", "train/reward")] == [1, 2]
    (offline,) = (tmp_path / "logs" / "wandb").glob("offline-run-*")
    assert next(offline.glob("*.wandb")).stat().st_size > 1000

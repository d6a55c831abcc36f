"""Checkpoint folders: whole or not there, the best kept, the broken refused with a reason."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
import torch

from loop.fakes import FakeLearner
from loop.tiny import build_tiny, tiny_tokenizer
from strop.checkpointing import folders
from strop.checkpointing.base import RunState
from strop.checkpointing.folders import BackgroundCheckpointer, CheckpointError, FolderCheckpointer
from strop.rollouts.stream import StreamState
from strop.storage.files import StorageError
from strop.types import Group, Rollout, Task

TOKENIZER = tiny_tokenizer()


def make(folder: Path, **changes) -> FolderCheckpointer:
    return FolderCheckpointer(**{"folder": folder, "config_text": "grpo: {}\n", "save_tokenizer": save_tokenizer, **changes})


def save_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.txt").write_text("abc")


def state(step: int, **logged: float) -> RunState:
    named = {name.replace("__", "/"): value for name, value in logged.items()}
    return RunState(step=step, stream=StreamState(next_index=4 * step, unfinished=(), finished=()), logged=named)


def test_a_checkpoint_has_what_its_doc_says(tmp_path):
    path = make(tmp_path).save(state(3), {"policy": FakeLearner(shift=0.5)})
    assert path == tmp_path / "step_3"
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == [
        "config.yaml",
        "contents.json",
        "files.json",
        "metric.json",
        "policy/optimizer.txt",
        "policy/weights/model.txt",
        "policy/weights/tokenizer.txt",
        "state.pt",
    ]
    assert (path / "config.yaml").read_text() == "grpo: {}\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_3"]


def test_what_was_saved_is_restored(tmp_path):
    rollout = Rollout(task=Task(id="t"), sample=0, seed=1, messages=(), prompt=torch.tensor([1, 2]))
    waiting = Group(index=9, environment="e", version=2, rollouts=(rollout,))
    saved = RunState(
        step=3, stream=StreamState(next_index=12, unfinished=(8, 10), finished=(waiting,)), logged={"train/loss": float("nan")}
    )
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    learners = {"policy": FakeLearner(shift=0.5, steps=7), "value": FakeLearner(shift=0.1)}
    path = make(tmp_path).save(saved, learners)
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    fresh = {"policy": FakeLearner(), "value": FakeLearner()}
    found = make(tmp_path).load(path, fresh)
    assert (found.step, found.stream.next_index, found.stream.unfinished) == (3, 12, (8, 10))
    assert found.stream.finished[0].index == 9 and found.stream.finished[0].rollouts[0].prompt.tolist() == [1, 2]
    assert (fresh["policy"].shift, fresh["policy"].steps, fresh["value"].shift) == (0.5, 7, 0.1)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn


def test_the_newest_checkpoint_is_the_one_with_the_highest_step(tmp_path):
    own = make(tmp_path, keep_top_k=None)
    assert own.find_newest() is None and own.list_steps() == []
    for step in (2, 9, 10):
        own.save(state(step), {"policy": FakeLearner()})
    (tmp_path / "step_99").write_text("a file is no checkpoint")
    (tmp_path / "step_100_backup").mkdir()
    assert own.find_newest() == tmp_path / "step_10" and own.list_steps() == [2, 9, 10]


VALUES = {1: 0.5, 2: 0.9, 3: None, 4: 0.7, 5: float("nan"), 6: 0.1}


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"keep_top_k": 2, "metric": "validation/accuracy"}, [2, 4, 6]),
        ({"keep_top_k": 2, "metric": "validation/accuracy", "higher_is_better": False}, [1, 6]),
        ({"keep_top_k": 1, "metric": "validation/accuracy"}, [2, 6]),
        ({"keep_top_k": 5, "metric": "validation/accuracy"}, [1, 2, 4, 5, 6]),
        ({"keep_top_k": 2, "metric": None}, [5, 6]),
        ({"keep_top_k": 2, "metric": "validation/never"}, [5, 6]),
        ({"keep_top_k": None, "metric": "validation/accuracy"}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_best_are_kept_and_always_the_newest(tmp_path, changes, kept):
    own = make(tmp_path, **changes)
    for step, value in VALUES.items():
        logged = {} if value is None else {"validation__accuracy": value}
        own.save(state(step, **logged), {"policy": FakeLearner()})
        assert step in own.list_steps()
    assert own.list_steps() == kept


def test_nothing_is_named_a_checkpoint_before_all_of_it_is_on_disk(tmp_path, monkeypatch):
    flushed: set[str] = set()
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        if target.name == "step_1":
            inside = {str(path) for path in self.rglob("*")} | {str(self)}
            assert inside <= flushed
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    make(tmp_path).save(state(1), {"policy": FakeLearner()})
    assert str(tmp_path) in flushed


class Killed(BaseException):
    pass


def calls(module, name: str):
    """How often a save calls something, and a version of it that dies at the n-th call."""
    original = getattr(module, name)
    count = 0

    def dies_at(n: int):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == n:
                raise Killed
            return original(*args, **kwargs)

        return wrapped

    return dies_at


@pytest.mark.parametrize(("module", "name"), [(os, "fsync"), (Path, "rename"), (folders.shutil, "rmtree"), (torch, "save")])
def test_a_save_that_dies_anywhere_leaves_only_whole_checkpoints(tmp_path, module, name):
    died = 0
    for n in range(1, 30):
        folder = tmp_path / str(n)
        own = make(folder, keep_top_k=1)
        own.save(state(1), {"policy": FakeLearner(shift=1.0)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, calls(module, name)(n))
            try:
                own.save(state(2), {"policy": FakeLearner(shift=2.0)})
                done = True
            except Killed:
                died, done = died + 1, False
        newest = own.find_newest()
        assert newest is not None
        learner = FakeLearner()
        found = make(folder).load(newest, {"policy": learner})
        assert learner.shift == found.step
        again = make(folder, keep_top_k=1)
        again.save(state(found.step + 1), {"policy": FakeLearner(shift=9.0)})
        assert [path.name for path in folder.iterdir()] == [f"step_{found.step + 1}"], "leftovers are cleared"
        if done:
            break
    assert died >= 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "state.pt").unlink(), r"state\.pt is missing"),
        (lambda path: (path / "policy" / "weights" / "model.txt").unlink(), r"weights/model\.txt is missing"),
        (lambda path: (path / "policy" / "weights" / "model.txt").write_text(""), r"model\.txt has 0 bytes, and 3 were saved"),
        (lambda path: (path / "state.pt").write_bytes(os.urandom((path / "state.pt").stat().st_size)), r"state\.pt is damaged"),
        (lambda path: (path / "files.json").unlink(), r"files\.json"),
        (lambda path: (path / "files.json").write_text("{"), "JSONDecodeError"),
    ],
)
def test_a_damaged_checkpoint_says_what_is_wrong_and_what_can_be_done(tmp_path, damage, said):
    own = make(tmp_path)
    path = own.save(state(1), {"policy": FakeLearner(shift=0.5)})
    damage(path)
    learner = FakeLearner(shift=4.0)
    with pytest.raises(CheckpointError, match=rf"step_1 cannot be resumed from: .*{said}") as caught:
        own.load(path, {"policy": learner})
    assert "another checkpointing.checkpoint_dir, or remove that folder" in str(caught.value)


def test_files_that_are_not_read_may_change(tmp_path):
    own = make(tmp_path)
    path = own.save(state(1), {"policy": FakeLearner(shift=0.5)})
    (path / "config.yaml").write_text("# a note of mine\n")
    (path / "notes.txt").write_text("a good one")
    assert own.load(path, {"policy": FakeLearner()}).step == 1


def test_checkpoints_of_an_earlier_run_are_set_aside(tmp_path):
    own = make(tmp_path / "results", keep_top_k=None)
    assert own.archive() is None
    for attempt in (1, 2):
        own.save(state(5), {"policy": FakeLearner()})
        own.save(state(7), {"policy": FakeLearner()})
        target = own.archive()
        assert target == tmp_path / "results" / f"previous_{attempt}" and own.list_steps() == []
        assert sorted(path.name for path in target.iterdir()) == ["step_5", "step_7"]


@pytest.mark.parametrize("file", ["state.pt", "policy/weights/model.txt", "policy/optimizer.txt", "policy/weights/tokenizer.txt"])
def test_a_flipped_bit_is_found_and_the_older_checkpoint_that_is_whole_is_offered(tmp_path, file):
    own = make(tmp_path, keep_top_k=None)
    paths = [own.save(state(step), {"policy": FakeLearner(shift=0.5, steps=step)}) for step in (1, 2, 3)]
    for path in paths[1:]:
        content = bytearray((path / file).read_bytes())
        content[len(content) // 2] ^= 1
        (path / file).write_bytes(content)
    learner = FakeLearner(shift=4.0)
    with pytest.raises(CheckpointError, match=rf"step_3 cannot be resumed from: .*{file} is damaged") as caught:
        own.load(paths[2], {"policy": learner})
    assert f"{paths[0]} is whole: checkpointing.resume=previous continues from it" in str(caught.value)
    assert learner.shift == 4.0, "nothing is loaded"
    own.verify(paths[0])


@pytest.mark.parametrize("file", ["config.yaml", "metric.json"])
def test_a_changed_record_is_said_and_the_checkpoint_is_used(tmp_path, caplog, file):
    own = make(tmp_path)
    path = own.save(state(1), {"policy": FakeLearner(shift=0.5)})
    (path / file).write_text((path / file).read_text().swapcase())
    assert own.load(path, {"policy": FakeLearner()}).step == 1
    assert f"{file} was changed" in caplog.text and "is used nevertheless" in caplog.text


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path):
    """It has sizes without checksums, and no id of its run."""
    own = make(tmp_path)
    path = own.save(state(1), {"policy": FakeLearner(shift=0.5)})
    sums = json.loads((path / "files.json").read_text())
    old = {name: entry["bytes"] for name, entry in sums.items() if name not in ("config.yaml", "metric.json") and name[0] != "/"}
    (path / "files.json").write_text(json.dumps(old))
    own.save(state(2), {"policy": FakeLearner()})
    assert own.load(path, {"policy": FakeLearner()}).step == 1


def test_step_05_is_not_step_5(tmp_path):
    own = make(tmp_path)
    path = own.save(state(4), {"policy": FakeLearner()})
    path.rename(tmp_path / "step_05")
    assert own.list_steps() == [] and own.find_newest() is None


def test_a_checkpoint_under_another_name_or_of_another_run_is_refused(tmp_path):
    own, other = make(tmp_path / "own"), make(tmp_path / "other")
    path = own.save(state(4), {"policy": FakeLearner()})
    shutil.copytree(path, tmp_path / "own" / "step_99")
    with pytest.raises(
        CheckpointError, match=r"step_99 cannot be resumed from: .*it is the checkpoint of step 4: the folder was renamed"
    ):
        own.load(tmp_path / "own" / "step_99", {"policy": FakeLearner()})
    shutil.rmtree(tmp_path / "own" / "step_99")
    shutil.copytree(other.save(state(99), {"policy": FakeLearner()}), tmp_path / "own" / "step_99")
    with pytest.raises(CheckpointError, match=r"step_99 .*it belongs to another run \(\w+\) than the earlier checkpoints"):
        own.load(tmp_path / "own" / "step_99", {"policy": FakeLearner()})
    shutil.rmtree(tmp_path / "own" / "step_99")
    again = make(tmp_path / "own").save(state(6), {"policy": FakeLearner()})  # the same run, continued
    assert own.load(again, {"policy": FakeLearner()}).step == 6


@dataclass
class Refused(FakeLearner):
    """A learner whose weights find no room, after a part of them was written."""

    error: Exception = field(
        default_factory=lambda: RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 5952 vs 5844")
    )

    def save(self, folder, *, optimizer=True):
        super().save(folder, optimizer=optimizer)
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device (os error 28)"), None],
)
def test_a_full_disk_removes_the_draft_and_says_folder_needed_and_free(tmp_path, monkeypatch, error):
    monkeypatch.setattr("strop.storage.files.free_bytes", lambda _: 0)
    own = make(tmp_path)
    with pytest.raises(
        StorageError, match=r"step 1 was not saved in .*: the disk is full\. A checkpoint needs more than \d+ bytes"
    ):
        own.save(state(1), {"policy": Refused(error=error) if error else Refused()})
    assert list(tmp_path.iterdir()) == []
    own.save(state(2), {"policy": FakeLearner()})
    before = {path: path.read_bytes() for path in (tmp_path / "step_2").rglob("*") if path.is_file()}
    with pytest.raises(
        StorageError, match=r"needs about .*, and there were .* for it; the newest whole checkpoint, step_2, is untouched"
    ):
        own.save(state(3), {"policy": Refused(error=error) if error else Refused()})
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert {path: path.read_bytes() for path in (tmp_path / "step_2").rglob("*") if path.is_file()} == before


def test_other_errors_of_a_learner_are_raised_as_they_are(tmp_path):
    with pytest.raises(ValueError, match="a bug"):
        make(tmp_path).save(state(1), {"policy": Refused(error=ValueError("a bug"))})


def test_a_draft_or_a_target_that_is_a_file_is_no_traceback(tmp_path):
    own = make(tmp_path)
    tmp_path.joinpath(".tmp_step_1").write_text("")
    own.save(state(1), {"policy": FakeLearner()})
    tmp_path.joinpath("step_2").write_text("mine")
    with pytest.raises(StorageError, match="step_2 is a file, and the checkpoint would be a folder of that name"):
        own.save(state(2), {"policy": FakeLearner()})
    assert (tmp_path / "step_2").read_text() == "mine"


def test_a_change_of_the_working_directory_does_not_move_checkpoints(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    own = make(Path("results"))
    assert own.save(state(1), {"policy": FakeLearner()}) == Path("results/step_1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert own.save(state(2), {"policy": FakeLearner()}) == tmp_path / "results" / "step_2"
    assert own.list_steps() == [1, 2]


# --- with the torch learner --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def torch_learner(folder: Path, seed: int = 0):
    from strop.models.loading import load_model
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.learners import make_scheduler_config, make_torch_learner

    network = Network(load_model(str(folder)), packed=True)
    return make_torch_learner(
        network,
        Sampling(),
        optimizer_kwargs={"lr": 1e-2},
        schedule=make_scheduler_config({"name": "torch.optim.lr_scheduler.ConstantLR"}),
    )


def move(learner) -> None:

    for parameter in learner.parameters:
        parameter.grad = torch.ones_like(parameter)
    learner.step()


def test_a_checkpoint_of_the_torch_learner_loads_with_from_pretrained(tmp_path, model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = torch_learner(model_folder)
    move(learner)
    own = make(tmp_path, save_tokenizer=TOKENIZER.save_pretrained)
    weights = own.save(state(1), {"policy": learner}) / "policy" / "weights"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(weights), AutoTokenizer.from_pretrained(weights)
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    asked = [{"role": "user", "content": "12 in 34"}]
    assert tokenizer.apply_chat_template(asked, add_generation_prompt=True) == TOKENIZER.apply_chat_template(
        asked, add_generation_prompt=True
    )


def test_a_restored_torch_learner_goes_on_bit_for_bit(tmp_path, model_folder):
    first = torch_learner(model_folder)
    move(first), move(first)
    own = make(tmp_path, save_tokenizer=TOKENIZER.save_pretrained)
    path = own.save(state(2), {"policy": first})
    second = torch_learner(model_folder)
    own.load(path, {"policy": second})
    move(first), move(second)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert second.scheduler.last_epoch == first.scheduler.last_epoch == 3


def test_a_checkpoint_without_optimizer_says_why_it_cannot_resume(tmp_path, model_folder):
    own = make(tmp_path, save_tokenizer=TOKENIZER.save_pretrained, save_optimizer=False)
    path = own.save(state(2), {"policy": torch_learner(model_folder)})
    assert not (path / "policy" / "optimizer.pt").exists()
    with pytest.raises(CheckpointError, match=r"saved with checkpointing\.save_optimizer=false and cannot resume"):
        own.load(path, {"policy": torch_learner(model_folder)})


def test_weights_that_do_not_fit_the_model_are_refused(tmp_path, model_folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    own = make(tmp_path, save_tokenizer=TOKENIZER.save_pretrained)
    path = own.save(state(2), {"policy": torch_learner(model_folder)})
    config = LlamaConfig.from_pretrained(model_folder)
    config.hidden_size, config.num_hidden_layers, config.head_dim = 16, 1, 4
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="step_2 cannot be resumed from: RuntimeError"):
        own.load(path, {"policy": torch_learner(tmp_path / "other")})


@dataclass
class Plain:
    """Holds one number, and writes it when it may."""

    value: int = 0
    may_write: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    error: OSError = field(default_factory=lambda: OSError("no space left"))

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        Held(self.value, self).save(folder)

    def load(self, folder: Path) -> None:
        self.value = int((folder / "weights").read_text())


class Learner(Plain):
    def stage(self, *, optimizer: bool = True) -> Held:
        return Held(self.value, self)


@dataclass
class Held:
    value: int
    learner: Plain

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        assert self.learner.may_write.wait(10)
        if self.learner.fails:
            raise self.learner.error
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.value))


def checkpoints(folder: Path) -> BackgroundCheckpointer:
    return BackgroundCheckpointer(FolderCheckpointer(folder=folder, config_text="grpo: {}\n", save_tokenizer=lambda _: None))


def step_state(step: int) -> RunState:
    return RunState(step=step, stream=StreamState(next_index=step, unfinished=(), finished=()), logged={})


def test_training_goes_on_while_a_checkpoint_of_the_moment_is_written(tmp_path: Path) -> None:
    learner, saving = Learner(value=7), checkpoints(tmp_path)
    random.seed(3)
    path = saving.save(step_state(1), {"policy": learner})  # type: ignore[dict-item]
    wanted = random.random()
    learner.value = 8
    assert path == tmp_path / "step_1" and not path.exists()
    learner.may_write.set()
    saving.finish()
    assert (path / "policy" / "weights").read_text() == "7"
    again = Learner()
    saving.folders.load(path, {"policy": again})  # type: ignore[dict-item]
    assert again.value == 7 and random.random() == wanted


def test_before_a_checkpoint_is_whole_the_one_before_is_the_newest(tmp_path: Path) -> None:
    learner, saving = Learner(), checkpoints(tmp_path)
    learner.may_write.set()
    saving.save(step_state(1), {"policy": learner})  # type: ignore[dict-item]
    saving.finish()
    learner.may_write.clear()
    saving.save(step_state(2), {"policy": learner})  # type: ignore[dict-item]
    assert saving.folders.find_newest() == tmp_path / "step_1"
    learner.may_write.set()
    saving.finish()
    assert saving.folders.find_newest() == tmp_path / "step_2"
    saving.finish()  # nothing is under way


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    learner, saving = Learner(), checkpoints(tmp_path)
    saving.save(step_state(1), {"policy": learner})  # type: ignore[dict-item]
    threading.Timer(0.3, learner.may_write.set).start()
    saving.save(step_state(2), {"policy": learner})  # type: ignore[dict-item]
    assert (tmp_path / "step_1").exists() and saving.wait_seconds > 0.2
    saving.finish()


def test_what_went_wrong_is_raised_by_whoever_asks_next(tmp_path: Path) -> None:
    learner, saving = Learner(fails=True), checkpoints(tmp_path)
    learner.may_write.set()
    saving.save(step_state(1), {"policy": learner})  # type: ignore[dict-item]
    with pytest.raises(OSError, match="no space left"):
        saving.save(step_state(2), {"policy": learner})  # type: ignore[dict-item]
    assert saving.folders.find_newest() is None


def test_a_learner_that_cannot_put_aside_what_it_holds_is_saved_at_once(tmp_path: Path) -> None:
    learner, saving = Plain(value=5), checkpoints(tmp_path)
    learner.may_write.set()
    path = saving.save(step_state(1), {"policy": learner})  # type: ignore[dict-item]
    assert (path / "policy" / "weights").read_text() == "5"


def test_a_full_disk_is_said_by_the_next_save_which_does_not_start_and_the_one_after_does(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    learner, saving = Learner(fails=True, error=full), checkpoints(tmp_path)
    learner.may_write.set()
    saving.save(step_state(1), {"policy": learner})  # type: ignore[dict-item]
    with pytest.raises(StorageError, match=r"the checkpoint of step 1 was not saved in .*: the disk is full"):
        saving.save(step_state(2), {"policy": learner})  # type: ignore[dict-item]
    learner.fails = False
    saving.save(step_state(3), {"policy": learner})  # type: ignore[dict-item]
    saving.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]

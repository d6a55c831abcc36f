"""Two runs in one folder, full disks and damaged checkpoints: what the command says, and what is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of, overrides, repeatable, start, tiny_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.sweep import sweep

pytestmark = pytest.mark.slow

CHANGES = {"grpo.val_period": 0, "checkpointing.metric_name": None, "logger.console": "plain"}


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert grpo(tiny, folder, **CHANGES).code == 0
    return folder


def assert_same_records(folder: Path, wanted: Path, *, rollouts: bool = True) -> None:
    found, other = (repeatable(metrics_of(place / "logs")) for place in (folder, wanted))
    for line in found.values():
        line.pop("train/checkpoint_failed", None)
    assert found == other
    if rollouts:
        assert list(RolloutStore(folder / "logs").read_all()) == list(RolloutStore(wanted / "logs").read_all())
    newest = "results/step_6/policy/weights/model.safetensors"
    assert (folder / newest).read_bytes() == (wanted / newest).read_bytes()
    left = [path.name for place in ("logs", "results") for path in (folder / place).iterdir()]
    assert not [name for name in left if name.startswith((".tmp", ".strop", "previous_"))], left


@pytest.mark.parametrize("moment", sweep(["at once", "in the middle"], "in the middle"))
def test_of_two_runs_in_one_folder_one_goes_on_and_the_other_says_who_is_there(tiny, tmp_path, undisturbed, moment):
    first = start(["grpo", *overrides(tiny_config(tiny, **CHANGES))], tmp_path)
    while moment == "in the middle" and not (tmp_path / "results" / "step_2").exists():
        time.sleep(0.01)
    if moment == "in the middle":
        os.kill(first.process.pid, signal.SIGSTOP)  # so that it is still there when the second one looks
    (tmp_path / "second").mkdir()
    places = {"logger.log_dir": str(tmp_path / "logs"), "checkpointing.checkpoint_dir": str(tmp_path / "results")}
    second = start(["grpo", *overrides(tiny_config(tiny, **CHANGES, **places))], tmp_path / "second")
    refused = second.finish() if moment == "in the middle" else None
    os.kill(first.process.pid, signal.SIGCONT)
    outcomes = sorted((first.finish(), refused or second.finish()), key=lambda outcome: outcome.code)
    assert [outcome.code for outcome in outcomes] == [0, 1]
    said = outcomes[1].err
    assert (
        "error: logger.log_dir: " in said
        and "is in use by another run: process " in said
        and "set another logger.log_dir" in said
    )
    assert "Traceback" not in said
    assert_same_records(tmp_path, undisturbed)


def test_a_run_is_refused_before_anything_of_the_other_is_touched(tiny, tmp_path):
    """With another log folder, the checkpoints alone are shared."""
    (tmp_path / "results" / "step_2").mkdir(parents=True)
    from strop.storage.folder_lock import FolderLock

    lock = FolderLock.acquire(tmp_path / "results")
    outcome = grpo(tiny, tmp_path, **CHANGES)
    assert outcome.code == 1 and "error: checkpointing.checkpoint_dir: results is in use by another run" in outcome.err
    assert not (tmp_path / "logs").exists() and (tmp_path / "results" / "step_2").exists()
    lock.release()


@dataclass(frozen=True)
class FullAfter:
    """For ``before``: flushing a file of a folder fails with ENOSPC, from the n-th call on, ``times`` times."""

    folder: str
    first: int
    times: int

    def __call__(self) -> None:
        flush, calls = os.fsync, 0

        def fsync(descriptor: int) -> None:
            nonlocal calls
            if f"/{self.folder}/" in os.readlink(f"/proc/self/fd/{descriptor}") and ".strop" not in os.readlink(
                f"/proc/self/fd/{descriptor}"
            ):
                calls += 1
                if self.first <= calls < self.first + self.times:
                    raise OSError(errno.ENOSPC, "No space left on device")
            flush(descriptor)

        os.fsync = fsync


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tiny, tmp_path, undisturbed):
    outcome = grpo(tiny, tmp_path, before=FullAfter("results", 3, 1), **CHANGES)
    assert outcome.code == 0, outcome.err
    assert "the checkpoint of step 2 was not saved in results: the disk is full. A checkpoint needs more than" in outcome.out
    assert "Training goes on, and the next step is saved instead" in outcome.out and "checkpoint: results/step_3" in outcome.out
    assert [step for step, line in metrics_of(tmp_path / "logs").items() if "train/checkpoint_failed" in line] == [2]
    assert_same_records(tmp_path, undisturbed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_last_checkpoint_without_room_is_an_error_and_the_same_command_continues(tiny, tmp_path, undisturbed, background):
    changes = {**CHANGES, "checkpointing.async_save": background}
    files = len([path for path in (undisturbed / "results" / "step_6").rglob("*")]) + 2
    outcome = grpo(tiny, tmp_path, before=FullAfter("results", 2 * files + 3, 1_000_000), **changes)
    assert outcome.code == 1 and "Traceback" not in outcome.err
    assert "error: the checkpoint of step 6 was not saved in results: the disk is full" in outcome.err
    assert "the newest whole checkpoint, step_4, is untouched" in outcome.err
    assert not list((tmp_path / "results").glob(".tmp*"))
    assert grpo(tiny, tmp_path, **changes).code == 0
    assert_same_records(tmp_path, undisturbed)


def test_a_full_disk_of_logs_costs_rollouts_and_no_metrics(tiny, tmp_path, undisturbed):
    outcome = grpo(tiny, tmp_path, before=FullAfter("logs", 6, 12), **CHANGES)
    assert outcome.code == 0 and "until there is room" in outcome.err and "is written again" in outcome.err
    assert "rollouts cannot be written to" in outcome.err and "files before it are lost" in outcome.err
    assert_same_records(tmp_path, undisturbed, rollouts=False)
    stored = list(RolloutStore(tmp_path / "logs").read_all())
    assert stored == [record for record in RolloutStore(undisturbed / "logs").read_all() if record in stored] != []


@pytest.mark.exhaustive
def test_a_disk_of_logs_that_stays_full_costs_records_and_not_the_model(tiny, tmp_path, undisturbed):
    """The run says what its records lack, and the same command, with room, records that it is finished."""
    outcome = grpo(tiny, tmp_path, before=FullAfter("logs", 8, 1_000_000), **CHANGES)
    assert outcome.code == 0 and "Traceback" not in outcome.err and "Errno" not in outcome.err, outcome.err
    assert "lacks the steps" in outcome.err and "cannot record that this run is finished: the disk is full" in outcome.out
    newest = "results/step_6/policy/weights/model.safetensors"
    assert (tmp_path / newest).read_bytes() == (undisturbed / newest).read_bytes()
    assert grpo(tiny, tmp_path, **CHANGES).code == 0
    assert "finished at step 6 of 6" in grpo(tiny, tmp_path, **CHANGES).out


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("logger.log_dir", "logs", "is a file, not a folder"),
        pytest.param("checkpointing.checkpoint_dir", "results", "is a file, not a folder", marks=pytest.mark.exhaustive),
        ("checkpointing.checkpoint_dir", "results/step_5", "is a file, and a checkpoint would be a folder of that name"),
        pytest.param("logger.log_dir", "logs/rollouts", "is a file, not a folder", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_in_the_way_is_found_before_models_load(tiny, tmp_path, key, name, said):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    shutil.copytree(tiny, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    outcome = grpo(tiny, tmp_path, **CHANGES, policy__model_name=str(tmp_path / "damaged"))
    assert outcome.code == 1 and f"error: {key}: {name} {said}" in outcome.err, outcome.err
    assert (tmp_path / name).read_text() == "mine"


def test_a_reward_that_changes_the_working_directory_changes_nothing(tiny, tmp_path):
    (tmp_path / "moves.py").write_text("import os\n\ndef reward(task, rollout):\n    os.chdir('/')\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"1+{n}=", "answer": n + 1}) + "\n" for n in range(8)))
    changes = {
        "env.arithmetic.max_operand": ...,
        "env.arithmetic.wording": ...,
        "data.train.env_name": ...,
        "data.train.dataset_name": "rows.jsonl",
        "data.train.split_validation_size": 2,
        "data.validation.env_name": ...,
        "data.validation.size": ...,
        "env.mine.reward": "moves.py:reward",
        "grpo.max_num_steps": 2,
        "checkpointing.save_period": 1,
    }
    outcome = grpo(tiny, tmp_path, **{**CHANGES, **changes, "grpo.val_period": 1})
    assert outcome.code == 0, outcome.err
    assert list(metrics_of(tmp_path / "logs")) == [1, 2] and (tmp_path / "results" / "step_2").exists()
    assert len(RolloutStore(tmp_path / "logs").steps()) == 2 and len(list((tmp_path / "logs" / "validation").iterdir())) == 2
    assert '"state": "finished"' in (tmp_path / "logs" / "status.json").read_text()
    assert '"finished": 2' in (tmp_path / "logs" / "config_history.jsonl").read_text()

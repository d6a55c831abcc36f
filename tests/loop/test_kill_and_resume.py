"""Law 6: a run can die anywhere. Killed and started again with the same command, it ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from loop.killing import HalfAFolder, HalfALine, Kill
from loop.kinds import assert_same_run
from loop.runs import grpo, metrics_of, overrides, repeatable, start, tiny_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.sweep import sweep

pytestmark = pytest.mark.slow

SIX = dict.fromkeys(range(7))  # step 0 is the validation before training
CHANGES = {"grpo.val_at_start": True, "grpo.use_dynamic_sampling": True}


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    outcome = grpo(tiny, folder, **CHANGES)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(folder / "logs")
    assert metrics.keys() == SIX.keys()
    assert len({line["train/loss"] for step, line in metrics.items() if step}) == 6, "there is something to compare"
    assert any(line["train/groups_dropped"] for step, line in metrics.items() if step)
    return folder


def read_files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file of a run, without what the test writes itself: when it was written, and its content."""
    files = [path for part in ("logs", "results") for path in sorted((folder / part).rglob("*")) if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.exhaustive
def test_a_run_is_repeated_bit_for_bit(tiny, tmp_path, uninterrupted):
    assert grpo(tiny, tmp_path, **CHANGES).code == 0
    assert_same_run(tmp_path, uninterrupted)


# Each chain is one run: killed at the first point, started again, killed at the second, ... and then left alone.
CHAINS = {
    "inside a save": [Kill("at a save", 1), Kill("at a file of the checkpoint", 2)],
    "inside every save": [
        Kill("at a file of the checkpoint", 1),
        Kill("at a file of the checkpoint", 2, "after"),
        Kill("at a save", 2),
    ],
    "around the rename": [Kill("at a rename", 1), Kill("at a rename", 1, "after"), Kill("at pruning", 1), Kill("at a rename", 2)],
    "while pruning": [
        HalfAFolder(1),
        HalfAFolder(1),  # now while it removes what the first one left
        HalfAFolder(2),
    ],
    "between save and log": [Kill("at a save", 1, "after"), Kill("at the log", 2), Kill("at the log", 3), HalfALine(2)],
    "inside a step": [
        Kill("in a micro-batch", 3),
        Kill("at the optimizer step", 3),
        Kill("at the optimizer step", 2, "after"),
        Kill("at a publish", 2),
    ],
    "between a step and its save": [
        Kill("at the stored rollouts", 3),
        Kill("at the stored rollouts", 2, "after"),
        Kill("at a file's replacement", 5),
        Kill("at a file's replacement", 4, "after"),
        Kill("at a validation", 3),
    ],
    "before the first save": [
        Kill("while generating", 1),
        Kill("at the log", 1, "after"),
        Kill("at the log", 2, "after"),
        HalfALine(1),
    ],
    "at any flush": [Kill("at a flush to disk", n) for n in (31, 25, 14, 1)],
}


@pytest.mark.parametrize("chain", sweep(CHAINS, "inside a save"))
def test_a_killed_run_ends_as_if_nothing_had_happened(chain, tiny, tmp_path, uninterrupted):
    for kill in CHAINS[chain]:
        outcome = grpo(tiny, tmp_path, before=kill, **CHANGES)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    outcome = grpo(tiny, tmp_path, **CHANGES)
    assert outcome.code == 0, outcome.err
    assert_same_run(tmp_path, uninterrupted)


FAILING = """
import random
from dataclasses import dataclass

from strop.endings import Ending, RolloutFailed
from strop.environments.arithmetic import Arithmetic
from strop.environments.base import reward


@dataclass(frozen=True, kw_only=True)
class Failing(Arithmetic):
    @reward(weight=0.0)
    def luck(self, task, rollout):
        luck = random.Random(rollout.seed).random()
        if luck < 0.3:
            raise RolloutFailed("the sandbox is gone", Ending.SANDBOX)
        if luck < 0.4:
            raise RolloutFailed("exit status 139", Ending.CRASH)
        return luck
"""


@pytest.mark.exhaustive
def test_a_run_whose_groups_are_partial_ends_after_kills_as_if_nothing_had_happened(tiny, tmp_path):
    """Rollouts fail by their seeds, some after they were sampled again; the second kill is while groups are unfinished."""
    changes = {
        "env.arithmetic.type": "failing.py:Failing",
        "grpo.failures.retries": 1,
        "grpo.failures.min_rollouts": 6,
        "grpo.failures.reward": -0.5,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        (folder / "failing.py").write_text(FAILING)
    assert grpo(tiny, whole, **changes).code == 0
    logged = [line for step, line in metrics_of(whole / "logs").items() if step]
    assert any(line.get("train/failures/sandbox") for line in logged) and any(line.get("train/failures/crash") for line in logged)
    assert any(line["train/reward_min"] == -0.5 for line in logged)
    for kill in (Kill("at a save", 1), Kill("while generating", 3), Kill("at the optimizer step", 2)):
        assert grpo(tiny, parts, before=kill, **changes).code == -signal.SIGKILL
    outcome = grpo(tiny, parts, **changes)
    assert outcome.code == 0, outcome.err
    assert_same_run(parts, whole)


@pytest.mark.exhaustive
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(tiny, tmp_path, uninterrupted):
    draw, killed = random.Random(11), 0
    arguments = ["grpo", *overrides(tiny_config(tiny, **CHANGES))]
    while killed < 6:
        running = start(arguments, tmp_path)
        time.sleep(draw.uniform(0.15, 1.0))
        running.process.kill()
        if running.finish().code == 0:  # it was done before that
            break
        killed += 1
    assert killed > 0
    assert grpo(tiny, tmp_path, **CHANGES).code == 0
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.exhaustive
def test_the_strop_command_itself_resumes_after_a_kill(tiny, tmp_path, uninterrupted):
    """The same in fresh interpreters, as a user starts them."""
    command = [sys.executable, "-m", "strop", "grpo", *overrides(tiny_config(tiny, **CHANGES))]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "results" / "step_2").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "results" / "step_6").exists(), "it was killed in the middle"
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_that_is_done_stays_as_it_is(tiny, tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    before = read_files(tmp_path)
    outcome = grpo(tiny, tmp_path, **CHANGES, logger__console="plain")
    assert outcome.code == 0 and "finished at step 6 of 6 on " in outcome.out and "grpo.max_num_steps=12" in outcome.out
    assert read_files(tmp_path) == before, "no byte is rewritten"
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_that_reached_its_metric_does_not_go_on_when_started_again(tiny, tmp_path):
    changes = {"grpo.stop_at_validation_metric": "accuracy", "grpo.stop_at_validation_threshold": 0.0}
    for _ in range(2):
        assert grpo(tiny, tmp_path, **changes).code == 0
        assert list(metrics_of(tmp_path / "logs")) == [1]


@pytest.mark.exhaustive
def test_a_run_whose_tasks_are_used_up_goes_on_when_it_is_given_more_passes(tiny, tmp_path):
    changes = {"data.train.size": 10, "grpo.max_num_steps": 5, "grpo.max_num_epochs": 1}
    ended = "grpo.max_num_epochs ended the run after step 2 before grpo.max_num_steps=5: all tasks are used; the 2 left over"
    for said in (ended, "finished at step 2 of 5 on "):
        outcome = grpo(tiny, tmp_path / "parts", **changes, logger__console="plain")
        assert outcome.code == 0 and said in outcome.out
    assert "To train on: grpo.max_num_epochs=2" in outcome.out
    changes["grpo.max_num_epochs"] = 2
    outcome = grpo(tiny, tmp_path / "parts", **changes, logger__console="plain")
    assert "resumed with: grpo.max_num_epochs 1 -> 2 (applied from step 3 on)" in outcome.out
    assert grpo(tiny, tmp_path / "whole", **changes).code == 0
    assert repeatable(metrics_of(tmp_path / "parts" / "logs")) == repeatable(metrics_of(tmp_path / "whole" / "logs"))
    assert list(metrics_of(tmp_path / "parts" / "logs")) == [1, 2, 3, 4, 5]


@pytest.mark.exhaustive
def test_a_weight_that_adapts_goes_on_where_the_checkpoint_left_it(tiny, tmp_path):
    """Two optimizer steps a batch, so the KL term in the reward is measured with the policy before the update."""
    kl = {"weight": 0.1, "estimator": "k3", "place": "token_reward", "target": 1e-4, "horizon": 100}
    changes = {"algorithm.kl": kl, "grpo.update_epochs": 2, "grpo.val_period": 0, "policy.optimizer.kwargs.lr": 0.01}
    for folder, steps in (("parts", 2), ("parts", 4), ("whole", 4)):
        assert grpo(tiny, tmp_path / folder, **changes, grpo__max_num_steps=steps).code == 0
    parts, whole = (repeatable(metrics_of(tmp_path / folder / "logs")) for folder in ("parts", "whole"))
    assert parts == whole
    weights = [whole[step]["train/kl_weight"] for step in (1, 2, 3, 4)]
    assert weights[0] == 0.1 and len(set(weights)) == 4
    assert weights[1:] == [whole[step]["train/kl_weight_next"] for step in (1, 2, 3)]


def test_an_asynchronous_run_loses_no_group_and_trains_on_none_twice(tiny, tmp_path):
    changes = {
        "grpo.async_grpo.enabled": True,
        "grpo.async_grpo.max_trajectory_age_steps": 1,
        "grpo.max_num_steps": 8,
        "grpo.val_period": 2,
    }
    buffered = 0
    for kill in (Kill("at the log", 3), Kill("at the optimizer step", 3), Kill("at a save", 2, "after")):
        assert grpo(tiny, tmp_path, before=kill, **changes).code == -signal.SIGKILL
        newest = max((tmp_path / "results").glob("step_*"), key=lambda path: int(path.name[5:]))
        buffered += len(torch.load(newest / "state.pt", weights_only=False)["state"].stream.finished)
    assert grpo(tiny, tmp_path, **changes).code == 0
    records = list(RolloutStore(tmp_path / "logs").read_all())
    assert sorted({record.group for record in records}) == list(range(8 * 4))
    identities = [(record.group, record.sample) for record in records]
    assert len(identities) == len(set(identities)) == 8 * 4 * 8, "every rollout is trained on once"
    for record in records:
        assert record.step == record.group // 4 + 1
        assert all(0 <= record.step - 1 - version <= 1 for version in record.versions)
    assert buffered > 0, "finished groups were saved and used"


def test_a_changed_rate_and_schedule_hold_from_the_next_step_on_in_metrics_and_records(tiny, tmp_path):
    short = {"grpo.num_generations_per_prompt": 2, "grpo.val_period": 0, "checkpointing.metric_name": None}
    assert grpo(tiny, tmp_path, **short, **{"grpo.max_num_steps": 2}).code == 0
    schedule = {"name": "linear", "kwargs": {"total_steps": 8}}
    changes = {"grpo.max_num_steps": 4, "policy.optimizer.kwargs.lr": 0.008, "policy.scheduler": schedule}
    outcome = grpo(tiny, tmp_path, **short, **changes, logger__console="plain")
    assert outcome.code == 0, outcome.err
    assert "policy.optimizer.kwargs.lr 0.003 -> 0.008" in outcome.out and "(applied from step 3 on)" in outcome.out
    assert outcome.out.index("continuing after step 2") < outcome.out.index("resumed with: ") < outcome.out.index("step 3/4")
    assert "step 2/4" not in outcome.out
    assert [line["train/lr"] for line in metrics_of(tmp_path / "logs").values()] == pytest.approx([0.003, 0.003, 0.006, 0.005])
    for folder in ("logs", "results/step_4"):
        assert "lr: 0.008" in (tmp_path / folder / "config.yaml").read_text()
    refused = grpo(tiny, tmp_path, **short, **changes, **{"grpo.seed": 7})
    assert refused.code == 1 and "grpo.seed: found 7, and the run in there has 42" in refused.err

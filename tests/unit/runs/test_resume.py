"""What a start finds in its folders, and what it makes of it: decided before anything is written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeLearner, Recorder
from strop.base_config import to_tree
from strop.checkpointing.base import RunState
from strop.checkpointing.folders import CheckpointError
from strop.config import TRAINING_RUNS, ConfigError, TrainingRunConfig, load_config
from strop.config.source.keys import Change, entry_model, find_field, iter_keys, role_of
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import HISTORY_FILE, record_finish
from strop.rollouts.stream import StreamState
from strop.runs.lifecycle import make_checkpoints
from strop.runs.restore import restore_checkpoint, resume_run
from strop.runs.run_folders import ResumeError, plan_resume, refuse_other_run
from strop.runs.train import train_as_configured
from strop.stopping import EarlyStop

BASE: dict[str, list[str]] = {
    "grpo": ["env.arithmetic={}"],
    "ppo": ["env.arithmetic={}", "value.optimizer.kwargs.lr=1e-5"],
    "distillation": ["env.arithmetic={}", "teacher.model_name=t", "teachers.b.model_name=u"],
    "sft": ["data.train.dataset_name=rows"],
    "dpo": ["data.train.dataset_name=rows"],
    "rm": ["data.train.dataset_name=rows"],
}


def configure(folder: Path, *overrides: str, kind: str = "grpo") -> TrainingRunConfig:
    places = [f"checkpointing.checkpoint_dir={folder / 'results'}", f"logger.log_dir={folder / 'logs'}", "logger.console=none"]
    given = ["policy.model_name=m", "policy.optimizer.kwargs.lr=1e-5", *BASE[kind], *places, *overrides]
    return load_config(None, given, root=TRAINING_RUNS[kind], check=False).config


def save(config: TrainingRunConfig, step: int = 4, groups: tuple[int, ...] = ()) -> Path:
    state = StreamState(next_index=16, unfinished=groups, finished=())
    saver = make_checkpoints(config, Path.exists)
    return saver.save(RunState(step=step, stream=state, logged={"train/loss": 2.0}), {"policy": FakeLearner()})


def restore(config: TrainingRunConfig) -> tuple[RunState | None, Recorder]:
    recorder, log_dir = Recorder(), Path(config.logger.log_dir)
    checkpoints = make_checkpoints(config, Path.exists)
    return restore_checkpoint(config, checkpoints, {"policy": FakeLearner()}, recorder, RolloutStore(log_dir)), recorder


# --- what is identity, and what is applied ----------------------------------------------------------------------------------------


def other_value(config: TrainingRunConfig, key: str, field: Any) -> str | None:
    """Another value of a key as an override, if one can be made of its type."""
    value: Any = to_tree(config)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return json.dumps(not value)
    if isinstance(value, int | float):
        return json.dumps(value * 2 or 1)
    text = str(field.annotation)
    if "bool" in text:
        return "true"
    if "str" in text and "tuple" not in text and "dict" not in text and "Literal" not in text:
        return "other"
    return (
        "[other]"
        if "tuple[str" in text
        else "{other: 1}"
        if "dict" in text
        else "3"
        if "int" in text or "float" in text
        else None
    )


@cache
def changes_of(kind: str, role: str) -> list[str]:
    """An override for every key of a role for which another value can be made."""
    root, found = TRAINING_RUNS[kind], []
    config = configure(Path("x"), kind=kind)
    for key in iter_keys(root, repeated=True):
        dotted = key.dotted.replace("teachers.<alias>", "teachers.b").replace("<alias>", "arithmetic")
        field = find_field(root, key.path)
        if field is None or entry_model(key.field) is not None or role_of(root, dotted.split(".")) != role:
            continue
        value = other_value(config, dotted, key.field)
        if value is None:
            continue
        try:
            changed = configure(Path("x"), f"{dotted}={value}", kind=kind)
        except ConfigError:
            continue
        if changed != config:
            found.append(f"{dotted}={value}")
    return found


@pytest.mark.parametrize("kind", TRAINING_RUNS)
def test_every_identity_key_is_refused_by_name_with_both_values_and_the_ways_out(kind: str, tmp_path: Path) -> None:
    keys = [key for key in iter_keys(TRAINING_RUNS[kind], repeated=True) if role_of(TRAINING_RUNS[kind], key.path) == "identity"]
    names = {key.dotted for key in keys}
    assert {
        "policy.model_name",
        "algorithm.name",
        f"{kind}.seed",
        "policy.optimizer.name",
        "policy.dtensor_cfg.lora_cfg.dim",
    } <= names
    assert {"data.train.dataset_name", "data.shuffle", "policy.weights_dtype"} <= names and len(names) > 35
    for key in names:
        with pytest.raises(ResumeError) as refusal:
            refuse_other_run(tmp_path, [Change("logger.log_dir", "unrelated", 1, 2), Change(key, "identity", "before", "after")])
        said = str(refusal.value)
        assert f"{tmp_path} holds another run" in said and f"\n    {key}: found after, and the run in there has before\n" in said
        assert (
            f"To continue that run, set {key}=before." in said
            and "run_name=NAME" in said
            and "checkpointing.resume=never" in said
        )


def test_what_a_section_says_of_its_keys_is_of_keys_that_it_has() -> None:
    iter_sections = pytest.importorskip("strop.extensions.reading.key_reference").iter_sections
    for kind, root in TRAINING_RUNS.items():
        for path, model in iter_sections(root):
            for name in {*model.identity_keys, *model.unrelated_keys} - {"*"}:
                assert find_field(model, name.split(".")[:1]) is not None, (kind, path, name)
    roles = {
        "identity": ("env.mine.reward", "env.mine.type", "teachers.b.model_name", "policy.optimizer.groups.0.match", "data.train.1.split"),
        "applied": ("policy.optimizer.groups.0.lr", "policy.scheduler.0.kwargs.min_ratio", "data.validation.0.size", "loss_fn.kl_type",
                    "policy.optimizer.kwargs.betas", "policy.ema.decay", "checkpointing.save_period", "algorithm.objective.high"),
        "unrelated": ("logger.wandb.name", "cluster.roles.learner.num_cpus", "policy.dtensor_cfg.tensor_parallel_size", "run_name"),
    }  # fmt: skip
    for role, keys in roles.items():
        assert {key: role_of(TRAINING_RUNS["distillation"], key.split(".")) for key in keys} == dict.fromkeys(keys, role)


def test_a_change_of_identity_is_refused_and_any_other_one_is_listed_or_nothing_to_training(tmp_path: Path) -> None:
    save(configure(tmp_path))
    refused = (
        "policy.model_name=n",
        "env.arithmetic.max_operand=3",
        "algorithm.name=dapo",
        "policy.optimizer.kwargs.amsgrad=true",
    )
    for change in refused:
        with pytest.raises(ResumeError, match=f"    {re.escape(change.partition('=')[0])}: found "):
            plan_resume(configure(tmp_path, change))
    applied = (
        "policy.optimizer.kwargs.weight_decay=0.5",
        "policy.scheduler={name: cosine}",
        "grpo.max_num_steps=7",
        "grpo.val_period=3",
    )
    plan = plan_resume(
        configure(tmp_path, *applied, "logger.num_val_samples_to_print=7", "policy.device=cpu", "cluster.num_nodes=2")
    )
    listed = {change.key for change in plan.changes}
    assert {change.partition("=")[0] for change in applied} <= {*listed, "policy.scheduler"} and "policy.scheduler.name" in listed
    assert not listed & {"logger.num_val_samples_to_print", "policy.device", "cluster.num_nodes"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TRAINING_RUNS)
def test_every_key_that_is_changed_is_refused_listed_or_nothing_to_training(kind: str, tmp_path: Path) -> None:
    save(configure(tmp_path, kind=kind))
    for role in ("identity", "applied", "unrelated"):
        for change in changes_of(kind, role):
            key = change.partition("=")[0]
            if key in ("checkpointing.checkpoint_dir", "checkpointing.enabled", "logger.log_dir") or key.startswith(
                "data.default."
            ):
                continue  # another folder, or none; what is a default for data.train is refused under that key
            if role == "identity":
                with pytest.raises(ResumeError, match=f"    {re.escape(key)}"):
                    plan_resume(configure(tmp_path, change, kind=kind))
                continue
            listed = ",".join(found.key for found in plan_resume(configure(tmp_path, change, kind=kind)).changes)
            assert (key in listed) == (role == "applied"), (change, listed)


@pytest.mark.extensions
def test_another_kind_of_run_is_refused(tmp_path: Path) -> None:
    save(configure(tmp_path))
    with pytest.raises(ResumeError, match=r"belongs to a run of `strop grpo`, and this is `strop sft`.*run_name=NAME"):
        plan_resume(configure(tmp_path, kind="sft"))


def test_a_log_folder_of_another_run_is_refused_too(tmp_path: Path) -> None:
    config = configure(tmp_path)
    save(config)
    restore(config)
    other = configure(tmp_path, f"checkpointing.checkpoint_dir={tmp_path / 'others'}", "grpo.seed=7")
    save(other)
    with pytest.raises(ResumeError, match=r"logs holds another run(.|\n)*grpo.seed: found 7, and the run in there has 42"):
        plan_resume(other)


def test_a_checkpoint_of_a_version_that_cannot_be_read_is_continued_and_that_is_said(tmp_path: Path) -> None:
    path = save(configure(tmp_path))
    (path / "config.yaml").write_text("grpo: {no_such_key: 1}\n")
    state, recorder = restore(configure(tmp_path))
    assert state is not None and any("config.yaml cannot be read, or was changed" in note for note in recorder.notes)


# --- resume: auto, must, never, previous ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_must_be_there_needs_checkpoints(tmp_path: Path) -> None:
    found = configure(tmp_path, "checkpointing.resume=must", "checkpointing.enabled=false").checkpointing.errors("checkpointing")
    assert ["found must, but checkpointing.enabled is false" in problem.message for problem in found] == [True]


def test_previous_sets_damaged_checkpoints_aside_and_continues_from_the_newest_whole_one(tmp_path: Path) -> None:
    config = configure(tmp_path, "checkpointing.resume=previous", "checkpointing.keep_top_k=null")
    damaged = [save(config, step) for step in (2, 4, 6)][1:]
    for path in damaged:
        (path / "policy" / "optimizer.txt").unlink()
    state, recorder = restore(config)
    assert state is not None and state.step == 2
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["damaged_step_4", "damaged_step_6", "step_2"]
    assert (tmp_path / "results" / "damaged_step_6" / "state.pt").exists(), "nothing is deleted"
    said = [note for note in recorder.notes if "damaged_step_6" in note]
    assert said and "optimizer.txt is missing" in said[0]
    assert restore(config)[0] is not None, "and again"


def test_previous_without_any_whole_checkpoint_touches_nothing(tmp_path: Path) -> None:
    config = configure(tmp_path, "checkpointing.resume=previous")
    (save(config) / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no intact checkpoint to continue from.*checkpointing.resume=never"):
        restore(config)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["step_4"]


# --- what is said and recorded ------------------------------------------------------------------------------------------------------


def test_a_continued_run_says_so_first_and_then_shows_the_step_it_continues_from(tmp_path: Path) -> None:
    config = configure(tmp_path)
    path = save(config)
    events: list[str] = []

    class Ordered(Recorder):
        def note(self, text: str) -> None:
            events.append(text)

        def log(self, step: int, values: Any) -> None:
            events.append(f"step {step}")

    checkpoints = make_checkpoints(config, Path.exists)
    changed = configure(tmp_path, "policy.optimizer.kwargs.lr=2e-5", "logger.num_val_samples_to_print=1")
    restore_checkpoint(changed, checkpoints, {"policy": FakeLearner()}, Ordered(), RolloutStore(tmp_path / "logs"))
    resumed = "resumed with: policy.optimizer.kwargs.lr 1e-05 -> 2e-05 (applied from step 5 on)"
    assert events == [f"continuing after step 4, from {path}", "step 4", resumed]


@pytest.mark.exhaustive
def test_the_history_says_from_which_step_which_settings_held(tmp_path: Path) -> None:
    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "logs" / HISTORY_FILE).read_text().splitlines()]

    first, second, third = (configure(tmp_path, f"policy.optimizer.kwargs.lr={lr}") for lr in (1e-5, 2e-5, 3e-5))
    restore(first)
    assert lines()[0]["from_step"] == 1 and lines()[0]["config"]["policy"]["optimizer"]["kwargs"]["lr"] == 1e-5
    save(first, 4)
    for _ in range(
        2
    ):  # the second start continues from the same step: what the first one would have applied is not recorded twice
        restore(second)
        assert [line["from_step"] for line in lines()] == [1, 5]
        assert lines()[1]["changed"] == {"policy.optimizer.kwargs.lr": [1e-5, 2e-5]}
    save(second, 6)
    record_finish(tmp_path / "logs", step=6, end="steps")
    restore(configure(tmp_path, "policy.optimizer.kwargs.lr=2e-5", "logger.console=plain"))
    assert [line["from_step"] for line in lines()] == [1, 5]
    restore(third)
    assert [line["from_step"] for line in lines()] == [1, 5, 7]


def test_groups_made_with_other_sampling_options_are_begun_again(tmp_path: Path) -> None:
    from strop.types import Group

    config = configure(tmp_path)
    waiting = tuple(Group(index=index, environment="e", version=3, rollouts=()) for index in (7, 5))
    stream = StreamState(next_index=9, unfinished=(6,), finished=waiting)
    make_checkpoints(config, Path.exists).save(RunState(step=4, stream=stream, logged={}), {"policy": FakeLearner()})
    for change, finished, unfinished in (
        ("policy.optimizer.kwargs.lr=1.0", 2, (6,)),
        ("policy.generation.temperature=0.5", 0, (5, 6, 7)),
    ):
        state, _ = restore(configure(tmp_path, change))
        assert state is not None and (len(state.stream.finished), state.stream.unfinished) == (finished, unfinished)


def test_early_stopping_follows_the_configured_rule_and_keeps_what_was_measured() -> None:
    from types import SimpleNamespace

    from strop.trainer.listeners import Listeners
    from strop.trainer.run import Saved

    def resumed(configured: EarlyStop | None, **saved: Any) -> EarlyStop | None:
        run: Any = SimpleNamespace(early_stop=configured, listeners=Listeners(), saved=Saved())
        old = EarlyStop(metric="validation/accuracy", patience=2, best=0.5, without_improvement=2, reason="over", **saved)
        resume_run(run, RunState(step=4, stream=StreamState(next_index=0, unfinished=(), finished=()), logged={}, early_stop=old))
        found: EarlyStop | None = run.early_stop
        return found

    same = resumed(EarlyStop(metric="validation/accuracy", patience=2))
    assert same is not None and (same.best, same.without_improvement, same.reason) == (0.5, 2, "over")
    longer = resumed(EarlyStop(metric="validation/accuracy", patience=5))
    assert longer is not None and (longer.patience, longer.without_improvement, longer.reason) == (5, 2, None)
    other = EarlyStop(metric="validation/reward", patience=2)
    assert resumed(other) == other and resumed(None) is None


# --- a run that is finished ----------------------------------------------------------------------------------------------------------


def finished_run(folder: Path, *overrides: str, end: Any = "steps") -> Callable[..., TrainingRunConfig]:
    config = configure(folder, "grpo.max_num_steps=30", *overrides)
    restore(config)
    save(config, 30)
    record_finish(folder / "logs", step=30, end=end)
    return lambda *more: configure(folder, "grpo.max_num_steps=30", *overrides, *more)


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_finished_run_says_so_and_rewrites_nothing(tmp_path: Path) -> None:
    again = finished_run(tmp_path)
    before = contents(tmp_path)
    said = str(asyncio.run(train_as_configured(again())))  # there is no model m: it is not looked for
    assert "finished at step 30 of 30 on 20" in said and "; nothing to do. To train on: grpo.max_num_steps=60." in said
    assert "run_name=NAME" in said and contents(tmp_path) == before


def test_a_finished_run_with_other_settings_is_refused_and_rewrites_nothing(tmp_path: Path) -> None:
    again = finished_run(tmp_path)
    before = contents(tmp_path)
    for change, wanted in (
        ("grpo.seed=7", "grpo.seed: found 7, and the run in there has 42"),
        (
            "grpo.max_num_steps=10",
            "so this would change nothing: grpo.max_num_steps 30 -> 10. To train on with it: grpo.max_num_steps=60",
        ),
        ("policy.optimizer.kwargs.lr=2e-5", "would change nothing: policy.optimizer.kwargs.lr 1e-05 -> 2e-05"),
    ):
        with pytest.raises(ResumeError) as refusal:
            asyncio.run(train_as_configured(again(change)))
        assert wanted in str(refusal.value), change
    assert contents(tmp_path) == before


def test_a_finished_run_goes_on_with_more_of_what_ended_it(tmp_path: Path) -> None:
    for end, change in (
        ("steps", "grpo.max_num_steps=40"),
        ("tasks", "grpo.max_num_epochs=3"),
        ("early_stop", "grpo.stop_at_validation_patience=4"),
    ):
        stop = ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_patience=2"]
        again = finished_run(tmp_path / end, *stop, end=end)
        assert plan_resume(again()).nothing_to_do is not None
        plan = plan_resume(again(change, "policy.optimizer.kwargs.lr=2e-5"))
        assert plan.nothing_to_do is None and len(plan.changes) == 2
    with pytest.raises(ResumeError, match=r"To train on with it: grpo.max_num_epochs=2 \(all tasks are used\)"):
        plan_resume(configure(tmp_path / "tasks", *stop, "grpo.max_num_steps=40"))


def test_a_finished_run_whose_checkpoint_is_damaged_is_not_called_finished(tmp_path: Path) -> None:
    again = finished_run(tmp_path)
    (tmp_path / "results" / "step_30" / "state.pt").unlink()
    assert plan_resume(again()).nothing_to_do is None


def test_fewer_steps_than_a_run_has_done_are_refused(tmp_path: Path) -> None:
    save(configure(tmp_path, "grpo.max_num_steps=30"), 12)
    with pytest.raises(ResumeError, match=r"finished at step 12.*grpo.max_num_steps 30 -> 10"):
        plan_resume(configure(tmp_path, "grpo.max_num_steps=10"))

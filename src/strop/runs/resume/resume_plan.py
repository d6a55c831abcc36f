"""What a run finds in its folders when it starts: nothing, a run to continue, a finished run, or another run.

Decided from the configurations, before anything is written or a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.checkpointing.folders import is_damaged, was_changed
from strop.checkpointing.step_folders import list_steps
from strop.config import TRAINING_RUNS, ConfigError, TrainingRunConfig, load_config
from strop.config.identity import Change, find_changes
from strop.config.source import yaml_text
from strop.monitoring.run_starts import FinishedRun, read_finish
from strop.runs.contents.run_contents import CONTENTS_FILE, ContentChange, compare_contents, find_contents, read_contents

CONFIG_FILE = "config.yaml"
ANOTHER_RUN = (
    "For a new run set run_name=NAME, which gets separate folders; to replace the run in {}, set checkpointing.resume=never, which moves "
    "what is there to previous_N"
)


class ResumeError(ValueError):
    """The folders hold a run that this configuration cannot continue. The message names the keys and the solutions."""


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The plan of a start."""

    checkpoint: Path | None = None  # to continue from; None: a new run
    changes: Sequence[Change] = ()  # settings that take effect from the next step on
    contents: Sequence[ContentChange] = ()  # changed contents behind names, accepted or allowed to change
    nothing_to_do: str | None = None  # the message for a finished run
    not_compared: Path | None = None  # a configuration that cannot be read, or was changed since it was saved


def plan_resume(config: TrainingRunConfig) -> ResumePlan:
    """Compare a configuration with the contents of its folders. Raises ResumeError."""
    saving = config.checkpointing
    folder = Path(saving.checkpoint_dir)
    if not saving.enabled or saving.resume == "never":
        return ResumePlan()
    steps = list_steps(folder)
    if not steps:
        if saving.resume == "must":
            raise ResumeError(
                f"checkpointing.resume is must, and {folder} holds no checkpoint (step_N) to continue from; correct "
                "checkpointing.checkpoint_dir, or set checkpointing.resume=auto to begin a new run"
            )
        return ResumePlan()
    checkpoint = folder / f"step_{steps[-1]}"
    saved = None if was_changed(checkpoint, CONFIG_FILE) else read_saved_config(checkpoint / CONFIG_FILE, config)
    if saved is None:
        return ResumePlan(checkpoint=checkpoint, not_compared=checkpoint / CONFIG_FILE)
    changes = find_changes(saved, config)
    refuse_other_run(folder, changes)
    log_dir = Path(config.logger.log_dir)
    if (logged := read_saved_config(log_dir / CONFIG_FILE, config)) is not None:
        refuse_other_run(log_dir, find_changes(logged, config))
    finished = read_finish(log_dir)
    if finished is not None and (saving.resume == "previous" or is_damaged(checkpoint)):
        finished = None  # the checkpoint is checked first
    applied = [change for change in changes if change.role == "applied"]
    nothing_to_do = describe_finished(config, steps[-1], applied, finished)
    return ResumePlan(
        checkpoint=checkpoint,
        changes=applied,
        contents=() if nothing_to_do is not None else _compare_contents(config, checkpoint),
        nothing_to_do=nothing_to_do,
    )


def _compare_contents(config: TrainingRunConfig, checkpoint: Path) -> list[ContentChange]:
    """Return the contents that differ from when the checkpoint was saved. Raises ResumeError for contents that identify the run."""
    saved = {} if was_changed(checkpoint, CONTENTS_FILE) else read_contents(checkpoint / CONTENTS_FILE)
    if not saved:  # of an earlier version
        return []
    changes = compare_contents(saved, find_contents(config), type(config))
    accepted = config.checkpointing.accept_changed
    other = [each for each in changes if each.role == "identity" and each.key not in accepted and "all" not in accepted]
    if other:
        lines = "".join(f"\n    {each}" for each in other)
        keys = ",".join(each.key for each in other)
        raise ResumeError(
            f"{checkpoint} was saved by a run in which the same names stood for something else:{lines}\n"
            f"To continue that run, put back what was there; to accept what is there now, set checkpointing.accept_changed=[{keys}]. "
            f"{ANOTHER_RUN.format(checkpoint.parent)}"
        )
    return changes


def read_saved_config(path: Path, config: TrainingRunConfig) -> TrainingRunConfig | None:
    """Return the configuration of an earlier run; None if there is none, or none that this version can read.

    Raises ResumeError if it is of another kind of run."""
    try:
        values, _ = yaml_text.parse(path.read_text(encoding="utf-8"))
        kinds = [kind for kind in TRAINING_RUNS if isinstance(values, Mapping) and kind in values]
        if kinds and config.section not in kinds:
            raise ResumeError(
                f"{path.parent} belongs to a run of `strop {kinds[0]}`, and this is `strop {config.section}`. "
                f"{ANOTHER_RUN.format(path.parent)}"
            )
        return load_config(path, root=type(config), check=False).config
    except (OSError, UnicodeDecodeError, yaml_text.YamlError, ConfigError):
        return None


def refuse_other_run(folder: Path, changes: Iterable[Change]) -> None:
    """Raise ResumeError if keys that identify a run differ."""
    other = [change for change in changes if change.role == "identity"]
    if other:
        lines = "".join(
            f"\n    {each.key}: found {_write(each.new)}, and the run in there has {_write(each.old)}" for each in other
        )
        old = " ".join(f"{each.key}={_write(each.old)}" for each in other)
        raise ResumeError(
            f"{folder} holds another run, which this one cannot continue:{lines}\n"
            f"To continue that run, set {old}. {ANOTHER_RUN.format(folder)}"
        )


def _write(value: object) -> str:
    return "null" if value is None else str(value)


def describe_finished(
    config: TrainingRunConfig, step: int, changes: Sequence[Change], finished: FinishedRun | None
) -> str | None:
    """Return the message for a run with nothing left to do; None if there is something.

    Raises ResumeError for changed settings that would take effect only in further steps."""
    last = config.training.last_step
    if finished is None or finished.step != step:
        if step <= last:
            return None
        finished = FinishedRun(step=step, end="steps", time="")
    extending, how = _find_extension(config, finished)
    if finished.end == "steps" and last > step:
        return None
    if finished.end != "steps" and any(change.key.startswith(extending) for change in changes):
        return None
    of = f" of {last}" if step <= last < 1_000_000 else ""
    where = f"the run in {config.checkpointing.checkpoint_dir} finished at step {step}{of}"
    when = f" on {finished.time}" if finished.time else ""
    again = "For a new run: run_name=NAME, or checkpointing.resume=never, which moves this one to previous_N."
    if changes:
        changed = ", ".join(map(str, changes))
        raise ResumeError(f"{where}{when}, so this would change nothing: {changed}. To train on with it: {how}. {again}")
    return f"{where}{when}; nothing to do. To train on: {how}. {again}"


def _find_extension(config: TrainingRunConfig, finished: FinishedRun) -> tuple[tuple[str, ...], str]:
    """Return the keys (or prefixes) with which a finished run can be extended, and a suggested setting."""
    section = config.section
    match finished.end:
        case "early_stop":
            return (f"{section}.stop_at_validation",), f"{section}.stop_at_validation_metric=null"
        case "tasks":
            epochs = f"{section}.max_num_epochs"
            keys = (epochs, f"{section}.num_prompts_per_step", "policy.train_global_batch_size")
            return keys, f"{epochs}={(config.training.max_num_epochs or 1) + 1} (all tasks are used)"
        case _:
            return (f"{section}.max_num_steps",), f"{section}.max_num_steps={2 * finished.step}"

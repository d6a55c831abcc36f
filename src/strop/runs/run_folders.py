"""The folders of a run or an evaluation: what is found in them at the start, locked and tested before models load, checked for space."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from strop.checkpointing.folders import is_damaged, was_changed
from strop.checkpointing.saved_model import list_steps
from strop.config import TRAINING_RUNS, ConfigError, TrainingRunConfig, load_config
from strop.config.source import yaml_text
from strop.config.source.keys import Change, find_changes
from strop.learner.client import InlineCaller, LearnerClient
from strop.learner.torch.learner import TorchLearner
from strop.monitoring.run_starts import FinishedRun, read_finish
from strop.monitoring.trackers.base import Tracker
from strop.runs.local_device import CHECKPOINT_DIR, LOG_DIR, list_folders
from strop.runs.run_contents import CONTENTS_FILE, ContentChange, compare_contents, find_contents, read_contents
from strop.storage.files import format_bytes, free_bytes, shorten_path
from strop.storage.folder_lock import check_entries, check_space, lock_folders, probe_folder

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


WRITTEN_IN_LOGS = ("rollouts", "validation", "engines", "workers", "wandb", "tensorboard")  # folders, where they exist
ADAM_STATES = 2  # float32 values per trained parameter


@contextmanager
def lock_run_folders(config: TrainingRunConfig) -> Iterator[ResumePlan]:
    """Lock the log and checkpoint folders of a run for the duration of the context, after testing every folder the run will
    write. Yield what the run will do with their contents.

    Raises FolderLocked if another run uses one of them, ResumeError if they hold a run that this one cannot continue, and StorageError if
    one cannot be written or a checkpoint has no room.
    """
    written = list_folders(config)
    logs = written[LOG_DIR]
    folders = {key: written[key] for key in (LOG_DIR, CHECKPOINT_DIR) if key in written}
    plans: list[ResumePlan] = []

    def check() -> None:
        plans.append(plan_resume(config))
        if plans[0].nothing_to_do is None:
            _check_folders(config, folders)

    with lock_folders(folders, log_dir=logs, hint=" (run_name sets both folders of a run)", check=check):
        yield plans[0]


def lock_evaluation_folder(folder: Path | None) -> AbstractContextManager[None]:
    """Lock the folder of an evaluation, if it writes any."""
    return lock_folders({"eval.save_path": folder.absolute()} if folder else {})


def _check_folders(config: TrainingRunConfig, folders: Mapping[str, Path]) -> None:
    for name in WRITTEN_IN_LOGS:
        inner = folders[LOG_DIR] / name
        if inner.exists() or inner.is_symlink():
            probe_folder(LOG_DIR, shorten_path(inner))
    for key, folder in list_folders(config).items():
        if key not in folders:
            probe_folder(key, shorten_path(folder))
    if CHECKPOINT_DIR in folders:
        checkpoints = shorten_path(folders[CHECKPOINT_DIR])
        check_entries(CHECKPOINT_DIR, checkpoints)
        if needed := _estimate_checkpoint(config):
            check_space(CHECKPOINT_DIR, checkpoints, needed, "one checkpoint")


def _estimate_checkpoint(config: TrainingRunConfig) -> int | None:
    """Return the size of a checkpoint's weights in bytes, from the headers of a local model; None if unknown.

    A lower bound without the optimizer, so that a clear lack of space is reported before the model loads.
    """
    policy = config.policy
    folder = Path(policy.model_name)
    if not folder.is_dir() or policy.adapter_rank is not None:
        return None
    try:
        count = sum(_count_parameters(path) for path in folder.glob("*.safetensors"))
    except (OSError, ValueError):
        return None  # reported when the model is loaded
    return count * (2 if policy.weights_dtype == "bfloat16" else 4) or None


def _count_parameters(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 1 << 27)))
    count = 0
    for name, entry in header.items():
        size = 1
        for length in entry["shape"] if name != "__metadata__" else (0,):
            size *= length
        count += size
    return count


def check_checkpoint_space(config: TrainingRunConfig, learners: Mapping[str, LearnerClient], tracker: Tracker) -> None:
    """Check that there is space for a checkpoint of the loaded models; note if there is not enough for all checkpoints to keep.
    Raises StorageError.

    Ranks in other processes are not queried; the earlier estimate covers them.
    """
    saving = config.checkpointing
    sizes = [_checkpoint_bytes(learner, optimizer=saving.save_optimizer) for learner in learners.values()]
    if not saving.saving_enabled or not all(sizes):
        return
    folder, needed = Path(saving.checkpoint_dir), sum(sizes)
    check_space(CHECKPOINT_DIR, folder, needed, "one checkpoint")
    kept = len([path for path in folder.glob("step_*") if path.is_dir()])
    wanted = None if saving.keep_top_k is None else max(1, saving.keep_top_k + 2 - kept)  # the best, the newest and a draft
    if wanted is not None and free_bytes(folder) < wanted * needed:
        tracker.note(
            f"warning: {CHECKPOINT_DIR}: {folder} has {format_bytes(free_bytes(folder))} free, and {wanted} more checkpoints "
            f"(checkpointing.keep_top_k={saving.keep_top_k}, the newest, and the one being written) need "
            f"{format_bytes(wanted * needed)}"
        )


def _checkpoint_bytes(learner: LearnerClient, *, optimizer: bool) -> int:
    """Return the size of a learner's weights and optimizer in a checkpoint; 0 for a learner in another process."""
    target = learner.caller.target if isinstance(learner.caller, InlineCaller) else None
    if not isinstance(target, TorchLearner):
        return 0
    trained = sum(parameter.numel() for parameter in target.parameters)
    saved = list(target.parameters) if target.config.dtensor_cfg.lora_cfg.enabled else list(target.model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in saved)
    averages = 1 + target.config.ema.enabled
    is_adam = "adam" in target.config.optimizer.name.lower() and "8bit" not in target.config.optimizer.name.lower()
    return weights * averages + (4 * ADAM_STATES * trained if optimizer and is_adam else 0)

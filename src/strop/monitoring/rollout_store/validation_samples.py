"""The samples of validations as rollouts, read from ``<log folder>/validation/step_000040.json``, written by evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.rollout_flags import FlaggedRollouts
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
from strop.monitoring.rollout_store.stored_files import naming_damage

VALIDATION_FOLDER = "validation"
_FILE_PATTERN = re.compile(r"step_(\d+)\.json")


class ValidationSamples:
    """Reads the validations of a run, or the folder that an evaluation saved (``eval.save_path``).

    A record has the accuracy among its metrics, but no tokens or log-probabilities.
    """

    def __init__(self, log_dir: Path) -> None:
        inside = Path(log_dir) / VALIDATION_FOLDER
        self.folder = inside if inside.is_dir() else Path(log_dir)

    def steps(self) -> list[int]:
        return sorted(int(match[1]) for path in self.folder.glob("step_*") if (match := _FILE_PATTERN.fullmatch(path.name)))

    def file(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.json"

    def read(self, step: int, task_id: str | None = None) -> list[RolloutRecord]:
        """Read the samples of the validation after ``step``, or those of one task. Raises FileNotFoundError, DamagedRollouts."""
        path = self.file(step)
        with naming_damage(path):
            values = json.loads(path.read_text(encoding="utf-8"))
            return list(_read_tasks(step, [task for task in values["tasks"] if task_id in (None, task["task"])]))

    def read_flags(self, step: int) -> FlaggedRollouts:
        """Return nothing: the reward hacking monitor does not examine validations."""
        return {}


def _read_tasks(step: int, tasks: Sequence[Mapping[str, Any]]) -> Iterator[RolloutRecord]:
    for group, task in enumerate(tasks):
        for index, sample in enumerate(task["samples"]):
            turns, missing = _read_turns(sample), sample["accuracy"] is None
            yield RolloutRecord(
                step=step,
                group=group,
                environment=task["environment"],
                task_id=task["task"],
                sample=index,
                prompt="",
                completion="".join(turn.text for turn in turns),
                prompt_tokens=(),
                tokens=(),
                sampled=(),
                sampler_logprobs=(),
                learner_logprobs=None,
                versions=(),
                advantage=None,
                reward=float(sample["reward"]),
                rewards=sample["rewards"],
                ending=sample["ending"] or "",
                error=sample["error"],
                kept=not missing,
                dropped_because="failed" if missing else None,
                answer=task["answer"],
                prompt_messages=tuple(map(_read_message, sample["messages"][: len(sample["messages"]) - len(turns)])),
                turns=turns,
                prompt_images=tuple((message, image) for message, image in sample.get("prompt_images", ())),
                metrics={**({} if missing else {"accuracy": float(sample["accuracy"])}), **sample.get("metrics", {})},
            )


def _read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a prompt message in the format of stored training messages."""
    return {"reasoning" if name == "reasoning_content" else name: value for name, value in message.items()}


def _read_turns(sample: Mapping[str, Any]) -> tuple[TurnRecord, ...]:
    """Return the turns of a sample, or its last completion in files of earlier versions, which have no turns."""
    if "turns" in sample:
        lists = ("versions", "images")
        return tuple(TurnRecord(**{**turn, **{name: tuple(turn.get(name, ())) for name in lists}}) for turn in sample["turns"])
    if not sample["messages"] or sample["messages"][-1]["role"] != "assistant":
        return ()
    return (TurnRecord(role="assistant", text=sample["completion"], start=0, end=sample["tokens"], sampled=True, versions=()),)

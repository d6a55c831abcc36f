"""Media of a step's rollouts for services: a table of a few, histograms of all, and the images in the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
from strop.monitoring.rollout_store.stored_images import StoredImages
from strop.monitoring.trackers.base import MetricHistogram, SampleImage, SampleRow, SampleTable, StepMedia
from strop.safety.printable import make_printable, shorten

LONGEST_TEXT = 4000  # characters of a prompt or completion in a table; rollouts/ has all of it
MOST_TOKENS = 50_000  # in the histogram of ratios


def make_step_media(records: Sequence[RolloutRecord], images: StoredImages, *, samples: int) -> StepMedia:
    """Return the media of a step: histograms, and a table of ``samples`` rollouts if that is not 0."""
    shown = _spread_out(records, samples)
    table = SampleTable(name="samples/train", rows=tuple(_make_row(record) for record in shown))
    return StepMedia(
        tables=(table,) if shown else (),
        histograms=tuple(_make_histograms(records)),
        images=tuple(_find_images(shown, images, "images/train")),
    )


def make_validation_media(tasks: Sequence[Mapping[str, Any]], *, samples: int) -> StepMedia:
    """Return the media of a validation from its stored tasks: the first sample of the first ``samples`` tasks."""
    rows = tuple(_row_of_task(task, task["samples"][0]) for task in tasks[:samples])
    rewards = tuple(float(sample["reward"]) for task in tasks for sample in task["samples"])
    lengths = tuple(float(sample["tokens"]) for task in tasks for sample in task["samples"])
    histograms = (("histograms/validation/reward", rewards), ("histograms/validation/length", lengths))
    return StepMedia(
        tables=(SampleTable(name="samples/validation", rows=rows),) if rows else (),
        histograms=tuple(MetricHistogram(name=name, values=_finite(values)) for name, values in histograms if _finite(values)),
    )


def _spread_out(records: Sequence[RolloutRecord], count: int) -> list[RolloutRecord]:
    """Return ``count`` rollouts spread from the lowest to the highest reward, failed ones last."""
    ordered = sorted(records, key=lambda record: (record.error is not None, record.reward, record.group, record.sample))
    if count >= len(ordered):
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / max(count - 1, 1))] for place in range(count)]


def _make_histograms(records: Sequence[RolloutRecord]) -> Iterator[MetricHistogram]:
    trained = [record for record in records if record.kept]
    values = {
        "reward": tuple(record.reward for record in trained),
        "length": tuple(float(np.asarray(record.sampled).sum()) for record in trained),
        "advantage": tuple(record.advantage for record in trained if record.advantage is not None),
        "log_ratio": _log_ratios(trained),
    }
    for name, found in values.items():
        if kept := _finite(found):
            yield MetricHistogram(name=f"histograms/{name}", values=kept)


def _log_ratios(records: Sequence[RolloutRecord]) -> tuple[float, ...]:
    """Return learner - sampler for the sampled tokens; for a large step, only of every n-th rollout."""
    scored = [record for record in records if record.learner_logprobs is not None]
    every = 1 + sum(len(record.tokens) for record in scored) // MOST_TOKENS
    found = [
        (np.asarray(record.learner_logprobs, float) - np.asarray(record.sampler_logprobs, float))[
            np.asarray(record.sampled, bool)
        ]
        for record in scored[::every]
    ]
    return tuple(np.concatenate(found).tolist()) if found else ()


def _finite(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(value for value in values if np.isfinite(value))


def _make_row(record: RolloutRecord) -> SampleRow:
    messages = "\n".join(f"{message['role']}: {message['content']}" for message in record.prompt_messages)
    ending = record.ending if record.error is None else f"error: {record.error}"
    return SampleRow(
        environment=_text(record.environment),
        task=_text(record.task_id),
        prompt=_text(messages or record.prompt),
        completion=_text(join_turns(record.turns, record.completion)),
        answer=_text(record.answer),
        reward=record.reward,
        ending=_text(ending),
    )


def _row_of_task(task: Mapping[str, Any], sample: Mapping[str, Any]) -> SampleRow:
    messages = sample["messages"][: len(sample["messages"]) - len(sample.get("turns", ()))]
    return SampleRow(
        environment=_text(task["environment"]),
        task=_text(str(task["task"])),
        prompt=_text("\n".join(f"{message['role']}: {message['content']}" for message in messages)),
        completion=_text(join_turns(sample.get("turns"), sample["completion"])),
        answer=_text(str(task["answer"])),
        reward=float(sample["reward"]),
        ending=_text(sample["ending"] or "error"),
    )


def _text(text: str) -> str:
    return make_printable(shorten(text, LONGEST_TEXT))


def _find_images(records: Sequence[RolloutRecord], images: StoredImages, name: str) -> Iterator[SampleImage]:
    for record in records:
        for _, image in record.prompt_images:
            if (path := images.find(image)) is not None:
                yield SampleImage(name=name, caption=f"{_text(record.task_id)}, reward {record.reward:.4g}", path=path)


def join_turns(turns: Sequence[TurnRecord | Mapping[str, Any]] | None, completion: str | None) -> str:
    """Return the main path: ``I ask [tool calculator] 4 [assistant] It is 4``, one turn per line.

    ``turns`` are records or rows of a file; without any, as in files of earlier versions, ``completion`` is used."""
    rows = [vars(turn) if isinstance(turn, TurnRecord) else turn for turn in turns or ()]
    main = [row for row in rows if not row.get("path")]
    if not main:
        return completion or ""
    first, *rest = main
    opened = "" if first.get("sampled") else f"{_mark(first)} "
    return "\n".join([f"{opened}{first.get('text') or ''}", *(f"{_mark(row)} {row.get('text') or ''}" for row in rest)])


def _mark(row: Mapping[str, Any]) -> str:
    return f"[{' '.join(filter(None, (row.get('role'), row.get('tool'))))}]"

"""``strop compare``: find or make evaluations of two models on the same tasks, and compare them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.checkpointing.saved_model import RUN_CONFIG, SavedModel, SavedModelNotFound, find_saved_model
from strop.config import EvalRunConfig, RolloutRunConfig, load_config
from strop.extensions.comparison.evaluation_comparison import ChangedTask, Comparison, check_options, compare_evaluations
from strop.extensions.comparison.matched_tasks import Identity, OtherTasks, list_setting_differences, match_tasks
from strop.extensions.comparison.paired_comparison import PairedComparison
from strop.extensions.evaluation.evaluate import CheckpointEvaluation, evaluate_any
from strop.extensions.evaluation.evaluated_run import EvaluatedRun, load_evaluated_run, translate_overrides
from strop.extensions.evaluation.statistics import NotComparable, TaskMetric
from strop.monitoring.console import ConsoleKind
from strop.safety.printable import make_printable

STEP_FILE = re.compile(r"step_(\d+)\.json")
UNFINISHED = "tasks.jsonl"  # what an evaluation that was interrupted leaves


@dataclass(frozen=True)
class StoredEvaluation:
    """The file of an evaluation."""

    path: Path

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotComparable(f"{self.path} cannot be read as an evaluation: {error}") from error
        return content if isinstance(content, dict) else {}

    @property
    def identity(self) -> Identity | None:
        """How the tasks were sampled and scored; None if the file does not say."""
        return self._content.get("identity")

    @property
    def tasks(self) -> Sequence[Mapping[str, Any]]:
        """The tasks with their samples. Raises NotComparable if the file is no evaluation."""
        tasks = self._content.get("tasks")
        if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) and task.get("samples") for task in tasks):
            raise NotComparable(
                f"{self.path} is no evaluation with samples: it needs 'tasks', each with 'samples', as strop eval and the validations of a "
                "run write them"
            )
        return tasks

    @property
    def run_config(self) -> Path | None:
        """The configuration of the run that the file lies in: validation/step_N.json, evaluations/NAME/step_N.json."""
        folders = (self.path.resolve().parents[1], self.path.resolve().parents[2])
        return next((folder / RUN_CONFIG for folder in folders if (folder / RUN_CONFIG).is_file()), None)


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """One of the two that are compared: a stored evaluation, or a model with the evaluations that are stored of it."""

    name: str  # as the user wrote it
    model: SavedModel | None = None
    stored: tuple[StoredEvaluation, ...] = ()  # the newest last

    @property
    def is_run(self) -> bool:
        """Whether it has the configuration of a run, which says what is evaluated."""
        return self.config_file is not None

    @property
    def config_file(self) -> Path | None:
        return self.model.config_file if self.model is not None else self.stored[0].run_config


def find_side(name: str, *, step: int | None = None, best: bool = False, ema: bool = False) -> ComparedSide:
    """Find what a name stands for: a file or folder of an evaluation, a run, a checkpoint or a model.

    ``step``, ``best`` and ``ema`` choose as ``strop eval`` does; ``step`` also among the evaluations in a folder.

    Raises NotComparable.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return ComparedSide(name=name, stored=(StoredEvaluation(path),))
    files = _list_steps(path)
    if files:
        return ComparedSide(name=name, stored=(StoredEvaluation(_choose_step(path, files, step)),))
    if (path / UNFINISHED).is_file():
        raise NotComparable(f"the evaluation in {path} did not finish; the same strop eval command continues it")
    try:
        model = find_saved_model(name, step=step, best=best, ema=ema)
    except SavedModelNotFound as error:
        validations = _list_steps(path / "validation")
        if validations and not (best or ema):  # a run that keeps no such checkpoint
            return ComparedSide(name=name, stored=(StoredEvaluation(_choose_step(path / "validation", validations, step)),))
        raise NotComparable(str(error)) from error
    return ComparedSide(name=name, model=model, stored=() if ema else _list_stored(model))


def _list_stored(model: SavedModel) -> tuple[StoredEvaluation, ...]:
    """Return the evaluations of a checkpoint in the log folder of its run, or next to it."""
    if model.step is None or model.checkpoint is None:
        return ()
    folder, file = model.log_folder or model.checkpoint.parent, f"step_{model.step:06d}.json"
    paths = [folder / "validation" / file, *sorted(folder.glob(f"evaluations/*/{file}"))]
    return tuple(StoredEvaluation(path) for path in paths if path.is_file())


def _list_steps(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = ((STEP_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def _choose_step(folder: Path, files: Mapping[int, Path], step: int | None) -> Path:
    if step is None:
        return list(files.values())[-1]
    if step not in files:
        raise NotComparable(f"{folder} has no evaluation of step {step}; there are: {', '.join(map(str, files))}")
    return files[step]


Note = Callable[[str], object]
RECORDED = ("sft", "dpo", "rm")
NEEDS_SETTINGS = (
    "neither {a} nor {b} belongs to a run that says what to evaluate on; name the tasks, as for strop eval: data.dataset_name=gsm8k, or "
    "--config FILE"
)


@dataclass(frozen=True, kw_only=True)
class ComparisonJob:
    """Two sides, how they are evaluated where nothing is stored, and what is asked of them."""

    a: ComparedSide
    b: ComparedSide
    config: Path | None = None  # further settings of an evaluation
    overrides: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  # settings from Python, nested
    metric: str = "accuracy"
    level: float = 0.95
    margin: float | None = None

    @property
    def changes_evaluation(self) -> bool:
        return self.config is not None or bool(self.overrides) or bool(self.values)


@dataclass(frozen=True)
class _Evaluated:
    """The tasks of one side, where they are from, and how they were sampled and scored."""

    tasks: Sequence[Mapping[str, Any]]
    source: str
    identity: Identity | None


def make_comparison_job(
    a: str,
    b: str,
    *,
    step: int | None = None,
    best: bool = False,
    ema: bool = False,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    metric: str = "accuracy",
    level: float = 0.95,
    margin: float | None = None,
) -> ComparisonJob:
    """Find the two sides. Raises NotComparable, also for options that cannot work."""
    check_options(metric, level, margin)
    if any(text.startswith("eval.save_path=") and not text.endswith("=null") for text in overrides):
        raise NotComparable(
            "eval.save_path is one folder, and two evaluations are made; leave it out (each is stored with its run), or evaluate both by "
            "strop eval first and compare the folders"
        )
    first, second = (find_side(name, step=step, best=best, ema=ema) for name in (a, b))
    return ComparisonJob(
        a=first, b=second, config=config, overrides=overrides, values=values or {}, metric=metric, level=level, margin=margin
    )


def compare_named(a: str, b: str, **options: Any) -> Coroutine[Any, Any, Comparison]:
    """Begin ``strop.compare`` of two names, with the options of ``make_comparison_job``. Raises NotComparable."""
    return compare_models(make_comparison_job(a, b, **options))


def describe_job(job: ComparisonJob) -> str:
    """Return what would be compared. Raises NotComparable and ConfigError."""
    pair = _find_stored_pair(job)
    lines = []
    for letter, side, file in zip("AB", (job.a, job.b), pair or (None, None), strict=True):
        if file is None and side.model is None:
            file = side.stored[-1]
        what = f"{side.name}, to be evaluated" if file is None else f"{side.name}, as stored in {file.path}"
        lines.append(f"{letter:<11} {what}")
    if pair is None:
        for side in (job.a, job.b):
            if side.model is not None:
                _configure(job, side)
    return "\n".join(lines)


async def compare_models(job: ComparisonJob, note: Note = print, *, console: ConsoleKind = "auto") -> Comparison:
    """Compare two models on stored evaluations of the same tasks; evaluate what is missing.

    Raises NotComparable for what cannot be compared, ConfigError, and the errors of an evaluation.
    """
    pair = _find_stored_pair(job)
    if pair is not None:
        a, b = map(_read, pair)
    else:
        a, b = await _evaluate_missing(job, note, console)
    found = compare_evaluations(
        a.tasks, b.tasks, metric=job.metric, level=job.level, margin=job.margin, identities=(a.identity, b.identity)
    )
    return replace(found, sources=(_name(job.a, a), _name(job.b, b)))


def _read(file: StoredEvaluation) -> _Evaluated:
    return _Evaluated(file.tasks, str(file.path), file.identity)


def _name(side: ComparedSide, evaluated: _Evaluated) -> str:
    step = None if side.model is None else side.model.step
    return f"{side.name}{'' if step is None else f', step {step}'}: {evaluated.source}"


def _find_stored_pair(job: ComparisonJob) -> tuple[StoredEvaluation, StoredEvaluation] | None:
    """Return the stored evaluations with the most tasks in common, as many samples of each, and sampled and scored alike; None if
    something has to be evaluated.

    Two files are always a pair.
    """
    if job.a.model is None and job.b.model is None:
        return job.a.stored[-1], job.b.stored[-1]
    if job.changes_evaluation:
        return None
    best, most = None, 0
    for a, b in itertools.product(job.a.stored, job.b.stored):
        try:
            matched = match_tasks(a.tasks, b.tasks).tasks
        except OtherTasks:
            continue
        alike = all(len(task.a["samples"]) == len(task.b["samples"]) for task in matched) and not _differ(a, b)
        if len(matched) >= most and (alike or job.a.model is None or job.b.model is None):
            best, most = (a, b), len(matched)
    return best


def _differ(a: StoredEvaluation, b: StoredEvaluation) -> bool:
    """Whether two evaluations are known not to be sampled and scored alike."""
    return a.identity is not None and b.identity is not None and bool(list_setting_differences(a.identity, b.identity))


async def _evaluate_missing(job: ComparisonJob, note: Note, console: ConsoleKind) -> tuple[_Evaluated, _Evaluated]:
    """Evaluate both on the same tasks, or one of them on the tasks of a stored evaluation of the other."""
    sides = (job.a, job.b)
    evaluated: list[_Evaluated | None] = []
    for side in sides:
        usable = side.stored and (side.model is None or (side is job.a and not job.changes_evaluation))
        file = _first_validation(side) if usable else None
        evaluated.append(None if file is None else _read(file))
    for index, side in enumerate(sides):
        if evaluated[index] is None:
            evaluated[index] = await _evaluate(job, side, note, console)
    first, second = evaluated
    assert first is not None and second is not None
    if job.a.model is not None and not _share_tasks(first, second):  # what was stored of A is not all that is evaluated
        first = await _evaluate(job, job.a, note, console)
    return first, second


def _first_validation(side: ComparedSide) -> StoredEvaluation:
    """Return what is most like an evaluation by the run's configuration: its own validation."""
    return side.stored[0] if side.model is not None else side.stored[-1]


def _share_tasks(a: _Evaluated, b: _Evaluated) -> bool:
    """Whether every task of B is one of A."""
    try:
        return not match_tasks(a.tasks, b.tasks).only_b
    except OtherTasks:
        return False


async def _evaluate(job: ComparisonJob, side: ComparedSide, note: Note, console: ConsoleKind) -> _Evaluated:
    evaluation = _configure(job, side)
    note(f"evaluating {side.name}")
    report = await evaluate_any(evaluation, note, console=console)
    if not report.tasks:
        raise NotComparable(f"the evaluation of {side.name} has no samples to compare")
    return _Evaluated(report.tasks, "evaluated now" if report.stored is None else str(report.stored), report.identity)


def _configure(job: ComparisonJob, side: ComparedSide) -> EvalRunConfig | CheckpointEvaluation:
    """Return the evaluation of one side: as the run of A, or else of B, validates, or as the settings say. Raises ConfigError."""
    assert side.model is not None
    template = next((each for each in (job.a, job.b) if each.is_run), None)
    if template is None or _gives_environment(job, template):
        return _configure_model(job, side.model)
    assert template.config_file is not None
    root = template.model.run_root if template.model is not None else Path()
    run = load_evaluated_run(template.config_file, list(job.overrides), root=root, file=job.config, values=job.values or None)
    if not isinstance(run.config, RolloutRunConfig):
        raise NotComparable(
            f"{template.name} is a run on recorded data, whose evaluation is a loss and not samples of tasks; say what both models are "
            "sampled on: env.math={} data.dataset_name=gsm8k, or compare its metrics with strop plot"
        )
    return CheckpointEvaluation(side.model, run if side is template else _with_tokenizer(run, side.model))


def _with_tokenizer(run: EvaluatedRun, model: SavedModel) -> EvaluatedRun:
    """Return the evaluation of another model than that of the run: with its own tokenizer and chat template."""
    own = model.run_values.get("policy", {}).get("tokenizer") or {}
    tokenizer = replace(
        run.config.policy.tokenizer,
        name=own.get("name") or model.weights,
        chat_template=own.get("chat_template"),
        chat_template_kwargs=own.get("chat_template_kwargs"),
    )
    return replace(run, config=replace(run.config, policy=replace(run.config.policy, tokenizer=tokenizer)))


def _gives_environment(job: ComparisonJob, side: ComparedSide) -> bool:
    """Whether a run on recorded data is to be sampled in an environment that the settings name."""
    given = any(text.lstrip("+").startswith(("env.", "env=", "data.env_name=")) for text in job.overrides) or "env" in job.values
    return given and side.model is not None and bool(set(RECORDED) & set(side.model.run_values))


def _configure_model(job: ComparisonJob, model: SavedModel) -> EvalRunConfig:
    if not job.changes_evaluation:
        raise NotComparable(NEEDS_SETTINGS.format(a=job.a.name, b=job.b.name))
    template = {
        name: value
        for name, value in (model.run_values.get("policy", {}).get("tokenizer") or {}).items()
        if name in ("chat_template", "chat_template_kwargs") and value is not None
    }
    values = {**job.values, "generation": {**job.values.get("generation", {}), "model_name": model.weights}}
    values["tokenizer"] = {"name": model.weights, **template, **job.values.get("tokenizer", {})}
    translated = translate_overrides(list(job.overrides), section=None)
    return load_config(job.config, translated.overrides, root=EvalRunConfig, values=values).config


TEXT_SHOWN = 160
HEADERS = ("tasks", "A", "B", "B - A", "interval", "p", "B higher", "B lower")


def format_comparison(found: Comparison) -> str:
    """Return the report that ``strop compare`` prints."""
    a, b = found.samples
    each = f"{a} of each" if a == b else f"{a} of each in A, {b} in B"
    lines = [
        f"A  {found.sources[0]}",
        f"B  {found.sources[1]}",
        f"{found.total.tasks:,} tasks, samples: {each}",
        *found.notes,
        "",
    ]
    lines += [*_format_tables(found), "", *_wrap_verdict(found)]
    better, worse = ("better", "worse") if found.metric.higher_is_better is not None else ("higher", "lower")
    for title, tasks in ((f"B {better}", found.won), (f"B {worse}", found.lost)):
        lines += ["", f"{title}, the largest differences:"] if tasks else []
        for task in tasks:
            lines += _format_task(task, found.metric)
    return "\n".join(make_printable(line) for line in lines)


def _wrap_verdict(found: Comparison) -> list[str]:
    verdict = found.verdict
    lines = [verdict[0].upper() + verdict[1:] + "."]
    if len(found.sets) > 1:
        lines.append("It is of the plain mean of the sets; the p-values of the sets are corrected for their number (Holm).")
    return lines + [f"  {sentence}" for sentence in found.forecast]


def _format_tables(found: Comparison) -> list[str]:
    level = f"{100 * found.total.level:g} %"
    header = ["", *(f"{level} interval" if name == "interval" else name for name in HEADERS)]
    several = len(found.sets) > 1
    rows = [format_row(name, each, found.metric) for name, each in found.sets.items()]
    rows += [format_row("mean of sets", found.total, found.metric)] if several else []
    main = _align([[name_metric(found.metric), *header[1:]], *rows])
    others = [format_row(name_metric(metric), each, metric) for metric, each in found.others.items() if each.a or each.b]
    return [*main, "", "For information, each by itself:", *_align([header, *others])]


def name_metric(metric: TaskMetric) -> str:
    return f"{metric.name}, %" if metric.is_share else metric.name


def format_row(name: str, found: PairedComparison, metric: TaskMetric) -> list[str]:
    scale, form, sign = (100, ".1f", "+.1f") if metric.is_share else (1, ".4g", "+.4g")
    low, high = (f"{scale * end:{sign}}" for end in (found.interval.low, found.interval.high))
    p_value = found.adjusted_p_value
    return [
        name,
        f"{found.tasks:,}",
        f"{scale * found.a:{form}}",
        f"{scale * found.b:{form}}",
        f"{scale * found.difference:{sign}}",
        f"{low} to {high}",
        "<0.001" if p_value < 0.001 else f"{p_value:.3f}",
        f"{found.higher:,}",
        f"{found.lower:,}",
    ]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _format_task(task: ChangedTask, metric: TaskMetric) -> list[str]:
    expected = "" if task.answer in (None, "") else f", expected {_shorten(str(task.answer))}"
    return [
        f"  {task.task}: {task.a:.3g} -> {task.b:.3g} {metric.name}{expected}",
        f"    {_shorten(task.question)}",
        f"    A: {_shorten(task.a_sample)}",
        f"    B: {_shorten(task.b_sample)}",
    ]


def _shorten(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= TEXT_SHOWN else f"{shown[: TEXT_SHOWN // 2]} ... {shown[-TEXT_SHOWN // 2 :]}"

"""``strop eval``: sample a model on a set of tasks and report its scores."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource, is_local
from strop.environments.mixture import Mixture
from strop.environments.resources import configure_resources, open_resources
from strop.extensions.evaluation.evaluated_run import EvaluatedRun
from strop.extensions.evaluation.evaluation_engines import OpenEngines, open_engines
from strop.extensions.evaluation.evaluation_folder import TaskLog, make_evaluation_job, make_run_evaluation_job, open_folder
from strop.extensions.evaluation.evaluation_report import EvaluationReport, SetResult, make_report, strip_prefix
from strop.extensions.evaluation.overlap import OverlapReport, find_overlaps
from strop.extensions.export.convert import loadable_folder
from strop.extensions.recorded.recorded_config import RecordedRunConfig
from strop.extensions.recorded.recorded_run import make_validation_groups, read_validation_examples
from strop.extensions.recorded.recorded_scores import LossValidator
from strop.learner.parallel.single_device import load_weights
from strop.monitoring.console import ConsoleKind, open_console
from strop.rollouts.policy_turns import describe_tool_calls
from strop.runs.backend import LocalBackend, make_columns
from strop.runs.evaluation_job import EvaluationJob, EvaluationSet, identify_entries
from strop.runs.exit_codes import run_command
from strop.runs.models import load_training_policy, resolve_device
from strop.runs.run_algorithm import make_run_algorithm
from strop.runs.summary import format_auto_engine, summarize
from strop.runs.tasks import make_mixture
from strop.safety.printable import shorten
from strop.sampling import Sampling
from strop.trainer.evaluation import Evaluator, write_results


@dataclass(frozen=True)
class CheckpointEvaluation:
    """A checkpoint, and its run's configuration with the evaluation's changes."""

    model: SavedModel
    run: EvaluatedRun


def run_evaluation(evaluation: EvalRunConfig | CheckpointEvaluation, *, as_json: bool = False) -> int:
    """Evaluate as configured. Return 0 on success, 1 after printing an error."""
    return run_command(_print_evaluation(evaluation, as_json))


def summarize_evaluation(evaluation: EvalRunConfig | CheckpointEvaluation) -> str:
    """Describe what is evaluated on which data, in a few lines. Raises ValueError."""
    if isinstance(evaluation, EvalRunConfig):
        return summarize(evaluation)
    model, config = evaluation.model, evaluation.run.config
    device, precision = resolve_device(config.policy.device), config.policy.precision
    of_step = "" if model.step is None else f", step {model.step}"
    lines = [f"model       {model.description}{of_step}, on {device}, {precision}", f"run         {model.config_file}"]
    names = ", ".join(_name_entry(entry.data_name, entry.env_name) for entry in config.data.validation_entries)
    if isinstance(config, RecordedRunConfig):
        return "\n".join([*lines, f"data        {names}, the loss of {config.algorithm.name}"])
    job = make_run_evaluation_job(evaluation.run, model)
    sampling = job.sets[0].sampling
    lines += format_auto_engine(config.policy.generation)
    first = "" if job.max_tasks is None else f", at most {job.max_tasks} tasks ({config.section}.max_val_samples)"
    lines += [
        f"sampling    {job.sets[0].samples} a task, temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} new tokens a "
        f"turn, {job.max_turns} {'turn' if job.max_turns == 1 else 'turns'}",
        f"tasks       {names}{first}",
    ]
    return "\n".join(lines)


def _name_entry(data: str | None, environment: str | None) -> str:
    return f"{data} ({environment})" if data and environment else str(data or environment or "the only environment")


async def _print_evaluation(evaluation: EvalRunConfig | CheckpointEvaluation, as_json: bool) -> None:
    note: Callable[[str], None] = partial(print, file=sys.stderr) if as_json else print
    note(summarize_evaluation(evaluation))
    report = await evaluate_any(evaluation, note, console="none" if as_json else "auto")
    print(report.to_json() if as_json else report.format())
    if report.says_nothing:
        raise ValueError("every sample failed, so these figures say nothing about the model")


async def evaluate_any(
    evaluation: EvalRunConfig | CheckpointEvaluation, note: Callable[[str], object] = print, *, console: ConsoleKind = "auto"
) -> EvaluationReport:
    """Evaluate a model as configured, or a checkpoint on its run's validation data."""
    if isinstance(evaluation, EvalRunConfig):
        return await evaluate_job(make_evaluation_job(evaluation), note, console=console)
    if isinstance(evaluation.run.config, RecordedRunConfig):
        return await _evaluate_loss(evaluation.run.config, evaluation.model)
    return await evaluate_job(make_run_evaluation_job(evaluation.run, evaluation.model), note, console=console)


async def evaluate_job(
    job: EvaluationJob, note: Callable[[str], object] = print, *, console: ConsoleKind = "auto"
) -> EvaluationReport:
    """Sample every unfinished task, score the samples and store them."""
    configure_resources(job.resources)
    identity = identify_entries(job).to_json()
    sources = [make_mixture(each.entries, job.env, "validation", seed=job.task_seed, purpose=job.purpose) for each in job.sets]
    environments = [component.environment for source in sources for component in source.components]
    for warning in warn_of_trained_questions(job.trained_on, sources, seed=job.task_seed):
        note(warning)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_resources(environments, note))
        log = stack.enter_context(open_folder(job, note))
        stored = None if log is None else log.folder
        shared = stored if job.cluster.num_nodes > 1 else None  # for temporary weights that several nodes read
        folder = stack.enter_context(loadable_folder(job.model, note, shared=shared))
        placed = job if folder == job.model.weights else job.with_model(folder)
        engines = await stack.enter_async_context(open_engines(placed, note, output_folder=stored))
        if said := describe_tool_calls(environments, engines.template, job.rules.tool_call_format):
            note(said)
        evaluators = [make_evaluator(job, each, source, engines, log) for each, source in zip(job.sets, sources, strict=True)]
        tracker = open_console(console)
        measured = [await evaluator.evaluate(job.model.step or 0, tracker) for evaluator in evaluators]
        results = [
            SetResult(each.name, strip_prefix(metrics), evaluator.last_tasks)
            for each, metrics, evaluator in zip(job.sets, measured, evaluators, strict=True)
        ]
        report = make_report(results, model=job.model, folder=stored)
        if report.stored is not None:
            found = {name: value for name, value in report.metrics.items() if not name.endswith("seconds")}
            write_results(report.stored, job.model.step or 0, found, report.tasks, identity=identity)
    if failed := report.describe_failures():
        note(f"warning: {failed}")
    return replace(report, identity=identity, headline=_name_headline(job, report.metrics))


def make_evaluator(
    job: EvaluationJob, each: EvaluationSet, source: Mixture, engines: OpenEngines, log: TaskLog | None
) -> Evaluator:
    voters = tuple(sorted({min(job.scoring.k_value, each.samples), each.samples}))
    return Evaluator(
        source=source,
        size=len(source) if job.max_tasks is None else min(len(source), job.max_tasks),
        samples=each.samples,
        generator=engines.generator,
        template=engines.template,
        sampling=each.sampling,
        rules=replace(job.rules, max_turns=_choose_turns(job, source)),
        seed=job.seed,
        ks=_choose_ks(job, each.samples),
        voters=voters,
        majorities=voters,
        concurrent_tasks=job.concurrent_tasks,
        finished=None if log is None else log.of_set(each.name),
        name_set=source.name_set if len(each.entries) > 1 else lambda index: each.name,
        keep_logprobs=job.scoring.save_logprobs,
    )


def _choose_turns(job: EvaluationJob, source: Mixture) -> int:
    """Return the maximum number of policy turns: as configured, otherwise as many as fit if an environment answers."""
    if job.max_turns is not None:
        return job.max_turns
    answers = any(each.environment.traits.responds for each in source.components)
    return job.rules.max_length if answers else 1


def _name_headline(job: EvaluationJob, metrics: Mapping[str, float]) -> str:
    """Return the metric chosen by ``eval.metric``. Raises ValueError if it needs answers to vote on and the environment has none."""
    samples = {each.samples for each in job.sets}
    if job.scoring.metric == "avg@n" and len(samples) > 1:
        return "accuracy"  # the same metric for each set, for any n
    k = min(samples) if job.scoring.metric == "avg@n" else job.scoring.k_value
    name = f"{job.scoring.metric[:-1]}{k}"
    if name not in metrics and "accuracy" not in metrics:
        return "errors"  # every sample is missing
    if name not in metrics:
        raise ValueError(
            f"eval.metric: {job.scoring.metric} votes on final answers, and the environment defines no answer_key; set another metric"
        )
    return name


def _choose_ks(job: EvaluationJob, samples: int) -> tuple[int, ...]:
    powers = {1 << power for power in range(samples.bit_length())}
    return tuple(sorted(powers | {min(job.scoring.k_value, samples)}))


MOST_ROWS = 100_000  # of training data: seconds


def warn_of_trained_questions(trained: Sequence[DataEntryConfig], evaluated: Sequence[Mixture], *, seed: int) -> Iterator[str]:
    """Yield a warning if evaluation questions occur verbatim in the run's training data, as far as that is local.

    The held-out part of a split entry and generated tasks are not training data.
    """
    entries = [entry for entry in trained if _is_here(entry)]
    if not entries:
        return
    questions = list(_list_questions(evaluated))
    texts = itertools.islice(_list_rows(entries, seed), MOST_ROWS)
    found = find_overlaps(questions, texts, threshold=2.0)  # only identical texts
    if found.exact:
        yield _describe(found)


def _describe(found: OverlapReport) -> str:
    first = found.found[0].closest[0]
    counted = f"{found.exact:,} of the {found.questions:,} questions are" if found.questions > 1 else "the question is"
    searched = f" (the first {MOST_ROWS:,} rows were searched)" if found.texts == MOST_ROWS else ""
    return (
        f"warning: {counted} in the training data of this run, word for word{searched}: {shorten(first.question, 80)} is {first.text}. The "
        "score says what was memorised; strop data check CONFIG lists the others"
    )


def _is_here(entry: DataEntryConfig) -> bool:
    """Whether the rows can be read without contacting a hub."""
    if entry.rows is not None:
        return True
    name = entry.dataset_name
    if name is None or is_local(name):
        return name is not None
    builtin = BUILTIN_DATASETS.get(name)
    try:
        return find_copy(name if builtin is None else builtin.hub) is not None
    except DataError:
        return False


def _list_questions(evaluated: Sequence[Mixture]) -> Iterator[tuple[str, str]]:
    """Yield the name and question of each task. A task that cannot be created is left to the evaluation, which reports it."""
    for source in evaluated:
        for index in range(len(source)):
            try:
                _, _, task = source.at(index)
            except Exception:
                continue
            yield task.id, task.question


def _list_rows(entries: Sequence[DataEntryConfig], seed: int) -> Iterator[tuple[str, str]]:
    for entry in entries:
        try:
            for row in DataSource.from_entry(entry, seed=seed, part="train").load_rows(needs_answers=False):
                yield row.id, row.question
        except (DataError, OSError):
            continue  # data moved since then: nothing is known about it


async def _evaluate_loss(config: RecordedRunConfig, model: SavedModel) -> EvaluationReport:
    """Compute the same as the run's validation, with the weights of a checkpoint. Raises ValueError without usable data."""
    algorithm = make_run_algorithm(config)
    config = replace(config, policy=replace(config.policy, ema=replace(config.policy.ema, enabled=False)))
    parts = read_validation_examples(config, algorithm)
    backend = LocalBackend(config, load_training_policy(config))
    tracker = open_console("none")
    groups = make_validation_groups(config, parts, algorithm, backend.bundle, tracker)
    learners = await backend.build_learners(algorithm, Sampling(), None)
    backend.learners["policy"].masters.release()
    columns = await make_columns(config, backend, algorithm, learners, tracker, {})  # of the model before training
    load_weights(backend.policy.network.model, Path(model.weights))
    validator = LossValidator(
        groups=groups,
        algorithm=algorithm,
        learner=learners["policy"],
        columns=columns,
        share_prefixes=config.policy.sequence_packing.prefix_sharing and backend.packed,
    )
    metrics = await validator.evaluate(0)
    return EvaluationReport(
        metrics={name.removeprefix("validation/"): value for name, value in metrics.items()},
        examples=len(validator.usable_groups),
        model=model.weights,
        step=model.step,
    )

"""``strop eval``: sample a model on a set of tasks and report its scores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from strop.build.engines import make_serving_engine
from strop.build.exit_codes import run_command
from strop.build.jobs.evaluation_job import (
    EvaluationJob,
    loadable_folder,
    make_evaluation_job,
    make_run_evaluation_job,
)
from strop.build.jobs.evaluation_report import EvaluationReport, compute_standard_errors
from strop.build.models import load_policy, resolve_device, select_device
from strop.build.run_folders import lock_evaluation_folder
from strop.build.summary import format_auto_engine, summarize
from strop.build.tasks import make_mixture
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, RecordedRunConfig
from strop.config.load.evaluated_run import EvaluatedRun
from strop.monitoring.console.console import ConsoleKind, open_console
from strop.rollouts.tool_turns import describe_tool_calls
from strop.sandbox.sandbox_pool import configure_sandbox, try_sandbox
from strop.trainer.evaluation import Evaluator


@dataclass(frozen=True)
class CheckpointEvaluation:
    """A checkpoint, and the configuration of its run as the evaluation changes it."""

    model: SavedModel
    run: EvaluatedRun


def run_evaluation(evaluation: EvalRunConfig | CheckpointEvaluation, *, as_json: bool = False) -> int:
    """Evaluate as configured. Return 0 on success, 1 after printing an error."""
    return run_command(_print_evaluation(evaluation, as_json))


def summarize_evaluation(evaluation: EvalRunConfig | CheckpointEvaluation) -> str:
    """Return what is evaluated on what, in a few lines. Raises ValueError."""
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
    sampling = job.sampling
    lines += format_auto_engine(config.policy.generation)
    first = "" if job.max_tasks is None else f", at most {job.max_tasks} tasks ({config.section}.max_val_samples)"
    lines += [
        f"sampling    {job.samples} a task, temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} new tokens a turn, "
        f"{job.rules.max_turns} {'turn' if job.rules.max_turns == 1 else 'turns'}",
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


async def evaluate_any(
    evaluation: EvalRunConfig | CheckpointEvaluation, note: Callable[[str], object] = print, *, console: ConsoleKind = "auto"
) -> EvaluationReport:
    """Evaluate a model as configured, or a checkpoint on what its run validates on."""
    if isinstance(evaluation, EvalRunConfig):
        return await evaluate_job(make_evaluation_job(evaluation), note, console=console)
    if isinstance(evaluation.run.config, RecordedRunConfig):
        from strop.build.jobs.loss_evaluation import evaluate_loss

        return await evaluate_loss(evaluation.run.config, evaluation.model, note)
    return await evaluate_job(make_run_evaluation_job(evaluation.run, evaluation.model), note, console=console)


async def evaluate_job(
    job: EvaluationJob, note: Callable[[str], object] = print, *, console: ConsoleKind = "auto"
) -> EvaluationReport:
    """Sample every task, score the samples and store them."""
    configure_sandbox(job.sandbox)
    source = make_mixture(job.entries, job.env, "validation", seed=job.task_seed, purpose=job.purpose)
    environments = [each.environment for each in source.components]
    if any(each.needs_sandbox for each in environments):
        note(await try_sandbox())
    step = job.model.step or 0
    with lock_evaluation_folder(job.folder), loadable_folder(job.model, note) as folder:
        placed = job if folder == job.model.weights else job.with_model(folder)
        select_device(placed.policy.device)
        policy = load_policy(placed.policy)
        if said := describe_tool_calls(environments, policy.template, placed.rules.tool_call_format):
            note(said)
        length, threads = placed.rules.max_length, placed.policy.num_threads
        engine = await make_serving_engine(policy, placed.generation, length, threads=threads)
        evaluator = Evaluator(
            source=source,
            size=len(source) if job.max_tasks is None else min(len(source), job.max_tasks),
            samples=job.samples,
            generator=engine,
            template=policy.template,
            sampling=job.sampling,
            rules=job.rules,
            seed=job.seed,
            folder=job.folder,
            ks=_choose_ks(job),
            voters=tuple(sorted({min(job.scoring.k_value, job.samples), job.samples})),
            concurrent_tasks=job.concurrent_tasks,
        )
        try:
            found = await evaluator.evaluate(step, open_console(console))
            evaluator.files.close()
        finally:
            await engine.close()
    metrics = {name.removeprefix("validation/"): value for name, value in found.items()}
    return EvaluationReport(
        metrics=metrics,
        standard_errors=compute_standard_errors(evaluator.last_tasks, list(metrics)),
        tasks=evaluator.last_tasks,
        headline=_name_headline(job, metrics),
        stored=None if job.folder is None else job.folder / f"step_{step:06d}.json",
        model=job.model.weights,
        step=job.model.step,
    )


def _name_headline(job: EvaluationJob, metrics: dict[str, float]) -> str:
    """Return the metric chosen by ``eval.metric``. Raises ValueError if it needs answers to vote on and the environment has none."""
    k = job.samples if job.scoring.metric == "avg@n" else job.scoring.k_value
    name = f"{job.scoring.metric[:-1]}{k}"
    if name not in metrics:
        raise ValueError(
            f"eval.metric: {job.scoring.metric} votes on final answers, and the environment defines no answer_key; set another metric"
        )
    return name


def _choose_ks(job: EvaluationJob) -> tuple[int, ...]:
    powers = {1 << power for power in range(job.samples.bit_length())}
    return tuple(sorted(powers | {min(job.scoring.k_value, job.samples)}))

"""``strop eval``: sample a model on a set of tasks and report its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.base_config import validate_section
from strop.build.engines import make_serving_engine
from strop.build.exit_codes import run_command
from strop.build.models import load_policy
from strop.build.run_folders import lock_evaluation_folder
from strop.build.summary import summarize
from strop.build.tasks import make_mixture
from strop.config import EvalRunConfig
from strop.learner.model_config import ModelConfig
from strop.monitoring.console.console import open_console
from strop.rollouts.episode import EpisodeRules
from strop.sampling import Sampling
from strop.trainer.evaluation import Evaluator


def run_evaluation(config: EvalRunConfig) -> int:
    """Evaluate as configured. Return 0 on success, 1 after printing an error."""
    return run_command(_print_evaluation(config))


@dataclass(frozen=True)
class EvaluationReport:
    """Metrics under ``validation/``, and every task with its samples as stored."""

    metrics: Mapping[str, float]
    tasks: Sequence[Mapping[str, Any]]


async def _print_evaluation(config: EvalRunConfig) -> None:
    print(summarize(config))
    metrics = (await evaluate_as_configured(config)).metrics
    for name, value in metrics.items():
        print(f"{name:32} {value:.4f}")
    print(_format_headline(config, metrics))
    if config.eval.save_path:
        print(f"every sample is in {config.eval.save_path}")


async def evaluate_as_configured(config: EvalRunConfig) -> EvaluationReport:
    with lock_evaluation_folder(config):
        return await _evaluate(config)


async def _evaluate(config: EvalRunConfig) -> EvaluationReport:
    generation = config.generation
    source = make_mixture([config.data], config.env, "validation", seed=config.eval.seed)
    model = {name: getattr(generation, name) for name in ("model_name", "device", "num_threads", "precision")}
    policy = load_policy(validate_section(ModelConfig, {**model, "tokenizer": config.tokenizer}))
    engine = await make_serving_engine(policy, generation, generation.max_total_sequence_length, threads=generation.num_threads)
    evaluator = Evaluator(
        source=source,
        size=len(source),
        samples=config.eval.num_tests_per_prompt,
        generator=engine,
        template=policy.template,
        sampling=Sampling(**generation.sampling_options()),
        rules=EpisodeRules(max_length=generation.max_total_sequence_length, max_prompt_length=config.data.max_input_seq_length),
        seed=config.eval.seed,
        folder=Path(config.eval.save_path).absolute() if config.eval.save_path else None,
        ks=_choose_ks(config),
        voters=tuple(sorted({config.eval.k_value, config.eval.num_tests_per_prompt})),
        concurrent_tasks=generation.num_prompts_per_step if generation.num_prompts_per_step > 0 else None,
    )
    try:
        metrics = await evaluator.evaluate(0, open_console("auto"))
        evaluator.files.close()
    finally:
        await engine.close()
    return EvaluationReport(metrics, evaluator.last_tasks)


def _format_headline(config: EvalRunConfig, metrics: Mapping[str, float]) -> str:
    """Format the metric chosen by ``eval.metric``. Raises ValueError if it needs answers to vote on and the environment has none."""
    k = config.eval.num_tests_per_prompt if config.eval.metric == "avg@n" else config.eval.k_value
    name = f"{config.eval.metric[:-1]}{k}"
    value = metrics.get(f"validation/{name}")
    if value is None:
        raise ValueError(
            f"eval.metric: {config.eval.metric} votes on final answers, and the environment defines no answer_key; set another metric"
        )
    return f"{name} = {value:.4f}"


def _choose_ks(config: EvalRunConfig) -> tuple[int, ...]:
    samples = config.eval.num_tests_per_prompt
    powers = {1 << power for power in range(samples.bit_length())}
    return tuple(sorted(powers | {min(config.eval.k_value, samples)}))

"""Checks made once a run's tokenizer is loaded: sizes of model, tokenizer and sequences, and the end of a turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from strop.config.schema.run_config import EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.data.sources.streamed import is_streamed
from strop.environments.base import DatasetEnvironment, PromptedTask
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Mixture
from strop.problems import Problem, raise_problems
from strop.runs.dry_run.examined_models import find_size_problems
from strop.runs.models import TokenizerBundle
from strop.sampling import Sampling

MOST_CHECKED = 10_000  # tasks whose answers are checked


def check_model(config: TrainingRunConfig | EvalRunConfig, bundle: TokenizerBundle, note: Callable[[str], object]) -> None:
    """Note settings that may not be as intended. Raises ValueError for sizes that would cause an index error."""
    errors, warnings = find_size_problems(config)
    raise_problems(errors)
    for warning in warnings:
        note(format_warning(warning))
    if isinstance(config, RolloutRunConfig):
        note_turn_end(bundle, Sampling(**config.policy.generation.sampling_options()), "policy.generation", note)


def format_warning(problem: Problem) -> str:
    return f"warning: {problem.key}: {' '.join(f'{problem.message} {problem.fix}'.split())}"


def note_turn_end(bundle: TokenizerBundle, sampling: Sampling, section: str, note: Callable[[str], object]) -> None:
    """Note if replies do not end where the chat template ends them: the remaining text would be trained on and read by rewards."""
    end = bundle.template.turn_end
    stops = {*bundle.stop_ids, *sampling.stop_token_ids}
    if end is None:
        if not stops and not sampling.stop_strings:
            note(
                f"warning: {section}.stop_token_ids: neither tokenizer nor model has a token that ends a reply, and none is set, so every "
                "reply continues to the token limit. Set it to the ids that end one, or stop_strings to a text."
            )
        return
    token_id, text = end
    if token_id not in stops and not any(each and text.endswith(each) for each in sampling.stop_strings):
        known = ", ".join(map(repr, bundle.tokenizer.convert_ids_to_tokens(sorted(stops)))) or "none"
        note(
            f"warning: {section}.stop_token_ids: the chat template ends a reply with {text!r}, which is not a stop token (those are "
            f"{known}), so replies continue after it, and rewards read the continuation. Set it to [{token_id}]."
        )


def note_empty_answers(source: Mixture, note: Callable[[str], object]) -> None:
    """Note rows with an empty expected answer: a reward that searches for it finds it in every reply."""
    for component in source.components:
        local = component.environment
        if is_streamed(component.tasks) or not (
            isinstance(local, LocalEnvironment) and isinstance(local.environment, DatasetEnvironment)
        ):
            continue
        checked: list[PromptedTask] = []
        for index in range(min(len(component.tasks), MOST_CHECKED)):
            with suppress(Exception):  # raised again, and counted, when it is its turn
                checked.append(component.tasks[index])  # type: ignore[arg-type]
        empty = [task for task in checked if not task.answer.strip()]
        has_answers = len(empty) < len(checked) or local.environment.needs_answers
        if empty and (has_answers or "answer" in (empty[0].metadata or {})):
            note(
                f"warning: {component.name}: the expected answer is empty in {len(empty)} of {len(checked)} tasks, first in "
                f"{empty[0].id}; a reward that looks for the answer in a reply finds it in all. Correct the rows, or remove them."
            )

"""Tasks of lm-eval: their prompts and their own scores of an answer."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

from strop.user_code import suggest_names


class LmEvalError(ValueError):
    """A task of lm-eval cannot be had, or is not of a kind that a generated answer decides."""


@lru_cache(maxsize=8)
def load_lm_eval_task(name: str, include_path: str) -> Any:
    """Load a task. Raises LmEvalError, and ImportError where the package is missing."""
    from lm_eval.tasks import TaskManager

    # The index of all its own tasks takes half a minute; a folder of the user's is enough where the task is in it.
    for with_own in (False, True) if include_path else (True,):
        manager = TaskManager(include_path=include_path or None, include_defaults=with_own)
        if name in manager.all_tasks:
            found = manager.load([name])["tasks"].get(name)
            break
    else:
        near = get_close_matches(name, manager.all_tasks)
        raise LmEvalError(
            f"lm-eval has no task {name!r}{suggest_names(name, near)}; include_path adds a folder with tasks of yours"
        )
    if found is None:
        raise LmEvalError(f"{name} is a group of lm-eval's tasks; name one of them")
    if found.OUTPUT_TYPE != "generate_until":
        raise LmEvalError(
            f"{name} compares log-likelihoods of given answers ({found.OUTPUT_TYPE}); only tasks in which the model writes an answer "
            "(generate_until) can be environments. Serve the model (strop serve), and let lm-eval ask it, for the others"
        )
    if getattr(found, "UNSAFE_CODE", False):
        raise LmEvalError(f"{name} runs code that the model wrote, in lm-eval's own process; use an environment with a sandbox")
    return found


def score_with_lm_eval(task: Any, doc: dict[str, Any], answer: str, metric: str) -> float:
    """Return the task's own metric of one answer, after the task's own filters. ``metric`` "": its first one."""
    from lm_eval.api.instance import Instance

    for stop in list_stops(task):
        answer = answer.partition(stop)[0]
    request = Instance(request_type="generate_until", doc=doc, arguments=("", {}), idx=0)
    request.resps.append(answer)
    chosen = task._filters[0]
    chosen.apply([request])
    found = task.process_results(doc, [request.filtered_resps[chosen.name]])
    name = metric or next(iter(found))
    if name not in found:
        raise LmEvalError(f"the task has no metric {name!r}; it has {', '.join(found)}")
    return float(found[name])


def load_scorer() -> Callable[..., Callable[[], float]]:
    """Return what scores an answer, in a process of ``strop.environments.scoring``."""

    def prepare(task: str, include_path: str, metric: str, answer: str, doc: dict[str, Any]) -> Callable[[], float]:
        return partial(score_with_lm_eval, load_lm_eval_task(task, include_path), doc, answer, metric)

    return prepare


def list_stops(task: Any) -> list[str]:
    """Return the texts at which the task ends an answer."""
    until = (task.config.generation_kwargs or {}).get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]

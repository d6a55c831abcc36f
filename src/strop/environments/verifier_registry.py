"""Verifiers by name, for the rewards of an environment; others are ``file.py:Class``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop import plugins
from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.environments.verifiers.base import (
    Score,
    Scored,
    Verifier,
    build_from_options,
    call_score,
    read_reply,
    read_turns,
    score_turns,
)
from strop.types import Rollout, Task
from strop.user_code import suggest_names


def list_verifiers() -> list[str]:
    """Return the names of all verifiers."""
    return sorted(plugins.declared("verifiers"))


def make_verifier(name: str, options: Mapping[str, Any], *, others: Sequence[str] = ()) -> Verifier:
    """Build the verifier ``name``. Raises EnvironmentConfigError for an unknown name and for unknown, ill-typed or missing options.

    ``others``: further allowed names that are read elsewhere."""
    path = (plugins.find_path("verifiers", name) or name) if isinstance(name, str) else ""
    if ":" not in path:
        raise EnvironmentConfigError(
            f"there is no verifier {name!r}{suggest_names(str(name), list_verifiers())}. Name your own as file.py:Class, or set "
            "function in place of verifier"
        )
    kind = import_user_code(path)
    if not (isinstance(kind, type) and issubclass(kind, Verifier)):
        raise EnvironmentConfigError(
            f"the verifier {name} is {kind!r:.80}, not a subclass of strop.environments.verifiers.base.Verifier; a function is a reward "
            "with function in place of verifier"
        )
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise EnvironmentConfigError(f"the verifier {name} does not define {', '.join(missing)}, which a verifier must")
    return build_from_options(kind, f"the verifier {name}", options, others=others)


@dataclass(frozen=True)
class VerifierReward:
    """A verifier as a reward function: for a rollout, for each of its turns, or for the rollouts of a task."""

    name: str
    verifier: Verifier
    per_turn: bool = False

    async def __call__(self, task: Task, rollouts: Any) -> Any:
        if self.verifier.compares:
            scores = await self.verifier.score_group(task, [read_reply(rollout) for rollout in rollouts])
            return [self._log([score], rollout)[0] for score, rollout in zip(scores, rollouts, strict=True)]
        rollout: Rollout = rollouts
        if self.per_turn:
            return self._log(await score_turns(self.verifier, task, read_turns(rollout)), rollout)
        return self._log([await call_score(self.verifier, task, read_reply(rollout))], rollout)[0]

    def _log(self, scores: list[Scored], rollout: Rollout) -> list[float | bool]:
        """Return the values; accompanying metrics, averaged over turns, become the rollout's."""
        logged: dict[str, list[float]] = {}
        for score in scores:
            for name, value in score.metrics.items() if isinstance(score, Score) else ():
                logged.setdefault(f"{self.name}/{name}", []).append(value)
        rollout.metrics.update({name: sum(values) / len(values) for name, values in logged.items()})
        return [score.value if isinstance(score, Score) else score for score in scores]

    def find_answer(self, rollout: Rollout) -> str | None:
        return self.verifier.find_answer(read_reply(rollout))

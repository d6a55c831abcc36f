"""Awaitable views of objects in this process."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from strop.learner.client import ColumnClient, InlineCaller, LearnerClient, LearnerThread, ScorerClient, ThreadCaller


def learner_client(learner: Any) -> LearnerClient:
    return LearnerClient(InlineCaller(learner))


def scorer_client(scorer: Any) -> ScorerClient:
    return ScorerClient(InlineCaller(scorer))


def column_client(source: Any) -> ColumnClient:
    return ColumnClient(InlineCaller(source))


class Blocking:
    """A learner whose methods block, over one whose methods are awaited."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            result = getattr(self.learner, name)(*arguments)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

        return call


def threaded_client(learner: Any, thread: LearnerThread | None = None) -> LearnerClient:
    """``learner`` has methods to await, such as a ``FakeLearner``; here they block a thread."""
    return LearnerClient(ThreadCaller(Blocking(learner), thread or LearnerThread()))

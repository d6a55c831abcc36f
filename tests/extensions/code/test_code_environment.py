"""The environment ``code`` in an episode, and in a process of its own."""

from __future__ import annotations

import asyncio
import pickle
from itertools import cycle

from loop.fakes import FakeGenerator
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.environments.handle import LocalEnvironment
from strop.extensions.code.code_environment import CodeEnvironment
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.sampling import Sampling
from strop.types import Group

ROWS = [{"task_id": 1, "text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}]
REPLIES = (
    "```python\ndef add(a, b): return a + b\n```",
    "```python\ndef add(a, b): return 3\n```",
    "```python\ndef add(a, b) return\n```",
    "",
)


def run(environment: CodeEnvironment) -> Group:
    tokenizer = tiny_tokenizer()
    replies = cycle(REPLIES)
    task = environment.tasks(DataSource(rows=ROWS))[0]
    return asyncio.run(
        run_group(
            0,
            "code",
            LocalEnvironment(environment),
            task,
            samples=len(REPLIES),
            generator=FakeGenerator(tokenizer, lambda request: (tokenizer(next(replies))["input_ids"], True)),
            template=ChatTemplate(tokenizer),
            sampling=Sampling(max_new_tokens=400),
            rules=EpisodeRules(max_length=2048),
            seed=0,
        )
    )


def test_a_group_is_graded_with_partial_credit_and_metrics() -> None:
    group = run(CodeEnvironment(score="fraction"))
    assert group.errors == ()
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.5, 0.0, 0.0]
    assert [rollout.rewards["compiles"] for rollout in group.rollouts] == [1.0, 1.0, 0.0, 0.0]
    assert all(rollout.metrics["timeouts"] == 0 for rollout in group.rollouts)


def test_the_environment_and_its_tasks_can_go_to_another_process() -> None:
    environment = CodeEnvironment()
    run(environment)
    task = environment.tasks(DataSource(rows=ROWS))[0]
    assert pickle.loads(pickle.dumps(environment)) == environment and pickle.loads(pickle.dumps(task)) == task

"""A simulated user: a script, and a language model behind a server on loopback."""

from __future__ import annotations

from typing import Any

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError, PromptedTask
from strop.extensions.games.user_simulator import UserSimulator
from strop.types import user
from support.games import played, see
from support.llm_server import llm_server


def task(**metadata: Any) -> PromptedTask:
    metadata = {"persona": "in a hurry", "replies": {"where|destination": "To Lisbon.", "when": "Tomorrow."}, **metadata}
    return PromptedTask(
        id="t", question="I need a flight.", answer="Lisbon", metadata=metadata, messages=(user("I need a flight."),)
    )


def test_a_script_answers_what_it_is_asked_and_the_goal_is_rewarded() -> None:
    simulator = UserSimulator()
    assert see(simulator, task(), "WHERE do you want to go?") == "To Lisbon."
    assert see(simulator, task(), "Who are you?") == "I don't know."
    rollout = played(simulator, task(), "Where to?", "<answer> lisbon. </answer>")
    assert rollout.rewards == {"understood": 1.0, "questions": 1.0} and rollout.reward == 1.0
    assert rollout.messages[0].role == "system" and "one question at a time" in rollout.messages[0].content
    assert played(simulator, task(), "<answer>Porto</answer>").reward == 0.0


def test_a_language_model_speaks_as_the_user_with_its_persona_and_goal() -> None:
    with llm_server(lambda request, number: f"reply {number}") as server:
        simulator = UserSimulator(endpoint={"base_url": server.base_url, "model": "m"})
        rollout = played(simulator, task(), "Where to?", "Why?", "<answer>Lisbon</answer>")
    first, second = server.requests
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "user"]
    assert "in a hurry" in first["messages"][0]["content"] and "Lisbon" in first["messages"][0]["content"]
    assert first["messages"][-1]["content"] == "Where to?" and first["messages"][2]["content"] == "I need a flight."
    assert second["messages"][-2:] == [{"role": "assistant", "content": "reply 0"}, {"role": "user", "content": "Why?"}]
    assert first["seed"] != second["seed"] and rollout.reward == 1.0
    assert [message.content for message in rollout.messages if message.role == "user"] == [
        "I need a flight.",
        "reply 0",
        "reply 1",
    ]


def test_rows_of_a_dataset_are_users(tmp_path: Any) -> None:
    rows = [{"opening": "Hello.", "goal": "tea", "persona": "old", "replies": {"what": "Tea, please."}}]
    data = DataSource(rows=rows, input_key="opening", output_key="goal")
    (made,) = UserSimulator().tasks(data)
    assert played(UserSimulator(), made, "What do you want?", "<answer>tea</answer>").reward == 1.0


def test_a_script_that_cannot_be_read_is_an_error_at_the_start() -> None:
    for replies, said in ((None, "column replies"), ({"(": "x"}, "regular expression")):
        rows = [{"problem": "Hi", "answer": "a", "replies": replies}]
        with pytest.raises(EnvironmentConfigError, match=said):
            UserSimulator().tasks(DataSource(rows=rows))

"""NeMo-RL's two environments of code: an interpreter, and words shared with a reference."""

from __future__ import annotations

import asyncio

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError, PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.extensions.code.code_interpreter import CodeInterpreter
from strop.extensions.code.extract_code import CodeJaccard, compare_words

TASK = PromptedTask(id="t", answer="42", messages=())


def converse(wrote, environment: CodeInterpreter, *texts: str) -> tuple[list[str | None], float]:
    """What the interpreter says to each turn, and the reward."""

    async def run() -> tuple[list[str | None], float]:
        said: list[str | None] = []
        async with environment.session(TASK):
            for count in range(1, len(texts) + 1):
                rollout = wrote(TASK, *texts[:count])
                messages = await environment.respond(TASK, rollout)
                said.append(None if messages is None else messages[0].content)
            return said, (await compute_rewards(environment, TASK, rollout)).reward

    return asyncio.run(run())


def test_variables_stay_and_a_value_ends_the_episode(wrote) -> None:
    turns = ("<code>\nprint('hidden')\nx = 40\n</code>", "I think.", "<code>x / 0</code>", "<code>x + 2</code>")
    said, reward = converse(wrote, CodeInterpreter(), *turns)
    assert said == ["", "", "<result>ZeroDivisionError('division by zero')</result>", None]
    assert reward == 1.0


def test_evaluation_need_not_end_the_episode(wrote) -> None:
    turns = ("<code>6 * 7</code>", "<code>[1,\n2]</code>\n", "<code>def f(): return 1</code>", "<code>f()</code>")
    said, reward = converse(wrote, CodeInterpreter(terminate_on_evaluation=False), *turns)
    assert said == ["<result>42</result>", "\n<result>\n[1, 2]\n</result>", "", "<result>1</result>"]
    assert reward == 0.0


def test_a_limit_is_said_and_the_interpreter_goes_on(wrote) -> None:
    said, _ = converse(wrote, CodeInterpreter(timeout_s=1), "<code>while True: pass</code>", "<code>1 +</code>", "<code>2</code>")
    assert "time limit" in said[0] and "SyntaxError" in said[1] and said[2] is None


def test_long_results_are_cut_in_the_middle(wrote) -> None:
    environment = CodeInterpreter(terminate_on_evaluation=False, max_result_chars=20)
    said, _ = converse(wrote, environment, "<code>'a' * 1000 + 'b'</code>")
    assert "characters ...]" in said[0] and "b'" in said[0] and len(said[0]) < 120
    with pytest.raises(EnvironmentConfigError):
        CodeInterpreter(timeout_s=0)


@pytest.mark.parametrize(
    ("reply", "reference", "similarity"),
    [
        (" Def F():\n return 1 ", "def f():\n return 1", 1.0),
        ("def f", "def f g", 2 / 3 * 5 / 7),
        ("", "def f", 0.0),
        ("def f", "", 0.0),
        ("", "", 1.0),
        ("x y", "a b", 0.0),
    ],
)
def test_similarity_is_shared_words_times_the_ratio_of_lengths(reply: str, reference: str, similarity: float) -> None:
    assert compare_words(reply, reference) == pytest.approx(similarity)


def test_the_words_of_all_turns_are_compared(wrote) -> None:
    row = {"problem": "Write f.", "answer": "def f(): return 1"}
    environment = CodeJaccard()
    task = environment.tasks(DataSource(rows=[row]))[0]
    result = asyncio.run(compute_rewards(environment, task, wrote(task, "def f():", " return 1")))
    assert dict(result.rewards) == {"similarity": 1.0, "aligned": 1.0, "highly_aligned": 1.0} and result.reward == 1.0

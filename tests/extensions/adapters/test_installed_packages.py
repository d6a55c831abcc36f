"""Adapters with the real packages that want an environment of their own: ``make test-adapters`` makes those and runs this."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.extensions.adapters.nemo_gym_environment import NemoGymEnvironment
from strop.extensions.adapters.openenv_environment import OpenEnvEnvironment
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.sampling import Sampling
from strop.types import Rollout
from support.adapter_episodes import episode, play
from support.adapter_servers import free_port, interpreter, running
from support.agents import TEMPLATE, Recorder, check_tree

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[2] / "support"


def solve(environment: Environment, data: DataSource, *texts: str, index: int = 0) -> Rollout:
    generator = Recorder(*texts)
    rollout = asyncio.run(
        run_episode(
            LocalEnvironment(environment),
            environment.tasks(data)[index],
            0,
            1,
            generator=generator,
            template=TEMPLATE,
            sampling=Sampling(max_new_tokens=200),
            rules=EpisodeRules(max_turns=20, max_length=4000),
        )
    )
    assert rollout.error is None
    check_tree(rollout, generator.sampled)
    return rollout


def test_the_example_that_openenv_makes_is_served_unchanged_and_played(tmp_path):
    python, port = interpreter("openenv"), free_port()
    subprocess.run([python, "-m", "openenv.cli", "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    command = [python, "-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    with running(command, port, tmp_path / "echo_env", path="/health") as url:
        environment = OpenEnvEnvironment(base_url=url, observation_field="echoed_message")
        seen, result = play(environment, ["hello", "<action>hello world</action>"])
        assert seen == ["Echo Env environment ready!", "hello", "hello world"]
        assert [step.reward for step in result.step_rewards] == pytest.approx([0.5, 1.1])

        async def many() -> list[float]:  # the example has one session at a time
            return [result.reward for _, result in await asyncio.gather(*(episode(environment, ["a" * n]) for n in range(1, 5)))]

        assert asyncio.run(many()) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


NEMO_GYM = {
    "example_single_tool_call": ([call("get_weather", city="sf"), "It is cold."], {}, {"score": 1.0}),
    "example_session_state_mgmt": (
        [call("increment_counter", count=1) + call("increment_counter", count=2), call("get_counter_value"), "6"],
        {},
        {"score": 1.0},
    ),
    "example_tool_call_multireward": (
        [call("get_weather", city="San Francisco"), "cold"],
        {"components": ("correctness", "schema_valid")},
        {"correctness": 1.0, "schema_valid": 1.0},
    ),
    "blackjack": (["<action>stand</action>"], {}, None),
}


@pytest.mark.parametrize("name", NEMO_GYM)
def test_resource_servers_of_nemo_gym_work_unchanged_on_their_own_example_data(name, tmp_path):
    python, port = interpreter("nemo-gym"), free_port()
    place = subprocess.run([python, "-c", "import resources_servers as r; print(r.__path__[0])"], capture_output=True, text=True)
    folder = Path(place.stdout.strip() or ".") / name
    texts, options, wanted = NEMO_GYM[name]
    with running([python, str(SUPPORT / "nemo_gym_server.py"), name, str(port)], port, tmp_path, path="/openapi.json") as url:
        kind = "gymnasium_agent" if name == "blackjack" else "simple_agent"
        agent = "blackjack_gymnasium_agent" if name == "blackjack" else "agent"
        environment = NemoGymEnvironment(servers={agent: {"url": url, "agent": kind}}, **options)
        rollout = solve(environment, DataSource(dataset_name=str(folder / "data" / "example.jsonl")), *texts)
    if wanted is None:
        assert rollout.rewards["score"] in (-1.0, 0.0, 1.0) and "hand" in rollout.messages[-2].content.lower()
    else:
        assert rollout.rewards == wanted


TASKSET = """
import verifiers.v1 as vf


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class ReverseTextConfig(vf.TasksetConfig):
    num_tasks: int = 5


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> list[ReverseTextTask]:
        words = ["abc", "xyz", "hello", "stop", "tea"][: self.config.num_tasks]
        return [ReverseTextTask(ReverseTextData(prompt=f"Reverse: {word}", answer=word[::-1]), self.config.task) for word in words]
"""


def test_a_package_that_verifiers_scaffolds_is_run_by_its_own_harness_through_the_gateway(tmp_path, monkeypatch):
    """``vf-init``, its task set filled in as its comments ask, and the null harness, whose program verifiers runs with uv."""
    python = interpreter("verifiers")
    monkeypatch.setenv("HOME", str(tmp_path))
    index = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    if index.returncode == 0:
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.stdout.strip())
    command = [str(Path(python).with_name("vf-init")), "reverse-text", "--path", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    package = tmp_path / "reverse_text"
    (package / "reverse_text" / "taskset.py").write_text(TASKSET)
    options = {"taskset": {"id": "reverse-text", "num_tasks": 3}, "agent": {"harness": {"id": "null"}}}
    environment = make_environment("verifiers", {"env": options, "python": python, "path": [str(package)], "held_out": 0.0})
    assert len(environment.tasks(DataSource())) == 3
    rollout = solve(environment, DataSource(), "cba")
    assert rollout.rewards == {"score": 1.0} and rollout.metrics["length"] == 3 and rollout.metrics["reward/reward"] == 1.0
    assert [message.content for message in rollout.messages] == ["Reverse: abc", "cba"]
    assert solve(environment, DataSource(), "no", index=1).rewards == {"score": 0.0}
    environment.process.close()
    with pytest.raises(EnvironmentConfigError, match=r"cannot load the environment.*taskset 'nothing' not found"):
        make_environment("verifiers", {"env": {"taskset": {"id": "nothing"}}, "python": python}).tasks(DataSource())


SUMS = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {train: FOLDER/train.jsonl, test: FOLDER/test.jsonl}
training_split: train
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], do_sample: false}
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def test_strop_eval_asks_a_task_of_lm_eval_and_reports_its_own_metric(tmp_path, tiny_model_folder):
    """The command, in the environment of lm-eval, which does not clash with Strop."""
    python = interpreter("lm-eval")
    (tmp_path / "sums.yaml").write_text(SUMS.replace("FOLDER", str(tmp_path)))
    for name, shift in (("train", 0), ("test", 5)):
        rows = [{"question": f"{a}+{a + shift}?", "answer": str(2 * a + shift)} for a in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "answers.py").write_text(
        "import asyncio, json\n"
        "from strop.environments.compute_rewards import compute_rewards\n"
        "from strop.environments.registry import make_environment\n"
        "from strop.data.sources.source import DataSource\n"
        "from support.adapter_episodes import policy_turn\n"
        "from strop.types import Rollout\n"
        "import torch\n"
        "env = make_environment('lm_eval', {'task': 'sums', 'include_path': '.', 'num_fewshot': 2, 'num_workers': 1})\n"
        "task = env.tasks(DataSource(split='validation'))[1]\n"
        "assert env.tasks(DataSource(split='validation'))[1] == task and len(env.tasks(DataSource(size=4))) == 4\n"
        "def score(text):\n"
        "    rollout = Rollout(task=task, sample=0, seed=0, messages=(), prompt=torch.tensor([1]), turns=(policy_turn(text),))\n"
        "    return asyncio.run(compute_rewards(env, task, rollout)).reward\n"
        "print(json.dumps([task.question, score('It is 7.\\nQ: 9'), score('8')]))\n"
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([*map(str, sys.path), str(SUPPORT.parent)])}
    environ["HOME"] = str(tmp_path)
    found = subprocess.run([python, "answers.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr[-2000:]
    question, right, wrong = json.loads(found.stdout.splitlines()[-1])
    assert question.count("Q:") == 3 and question.endswith("Q: 1+6?\nA:") and (right, wrong) == (1.0, 0.0)
    settings = {
        "eval.num_tests_per_prompt": 1,
        "generation.model_name": str(tiny_model_folder),
        "generation.backend": "torch",
        "data.env_name": "sums",
        "env.sums.type": "lm_eval",
        "env.sums.task": "sums",
        "env.sums.include_path": ".",
    }
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    found = subprocess.run(
        [python, "-m", "strop", "eval", *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert found.returncode == 0, found.stderr[-3000:] + found.stdout[-2000:]
    assert "accuracy" in found.stdout

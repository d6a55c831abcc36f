"""Streams of tasks from environments here and from environments in other processes: the same tasks."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

from strop.config import dump_config, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.remote import RemoteEnvironment, connect
from strop.runs.tasks import describe_environments, list_reward_names, make_training_tasks, make_validation_tasks
from strop.types import Rollout, Task
from support.environment_servers import EnvironmentServerThread


def test_a_run_over_hosted_environments_asks_the_same_tasks_in_the_same_order(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"problem": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(30)))
    entries = (
        f'[{{"env_name": "sums", "weight": 1.0, "size": 40}}, '
        f'{{"env_name": "written", "weight": 2.0, "dataset_name": "{rows}", "split_validation_size": 8}}]'
    )
    base = ("policy.model_name=m", "grpo.val_period=0", "checkpointing.metric_name=null", f"data.train={entries}")
    environments = ("env.sums.type=arithmetic", "env.sums.max_operand=7", "env.written.type=math")
    config = load_config(None, [*base, *environments], root=GrpoRunConfig).config

    def streams(hosted: dict[str, RemoteEnvironment]) -> list[tuple[str, str, str, str]]:
        train = make_training_tasks(config, hosted)
        held_out = make_validation_tasks(config, hosted)
        assert held_out is not None
        found = [source.at(index) for source in (train, held_out) for index in range(len(source))]
        return [(name, task.id, task.question, task.answer) for name, _, task in found]

    made = describe_environments(config)
    assert {alias: (own.name, len(own.sources)) for alias, own in made.items()} == {
        "sums": ("arithmetic", 1),
        "written": ("math", 2),
    }
    hosts = {alias: EnvironmentServerThread(pickle.loads(pickle.dumps(own))) for alias, own in made.items()}
    try:
        hosted = {alias: connect(host.description, [host.transport]) for alias, host in hosts.items()}
        assert streams(hosted) == streams({})
    finally:
        for host in hosts.values():
            host.close()


def correct(task: Task, rollout: Rollout) -> bool:
    return task.answer in rollout.text


def test_a_reward_without_a_type_is_an_environment_of_functions(tmp_path: Path) -> None:
    """Named in the configuration, or given as functions from Python with rows in memory."""
    (tmp_path / "mine.py").write_text("def correct(task, rollout):\n    return True\n")
    overrides = ("policy.model_name=m", f"env.mine.reward={tmp_path}/mine.py:correct", "data.train.size=2")
    config = load_config(None, overrides, root=GrpoRunConfig, check=False).config
    entry = config.data.train[0].with_rows([{"prompt": f"{n}+1", "answer": n + 1} for n in range(3)])
    for env in (config.env, {"mine": EnvironmentConfig(type=None, rewards={"correct": {"function": correct, "weight": 2.0}})}):
        given = replace(config, env=env, data=replace(config.data, train=(entry,), shuffle=False))
        name, environment, task = make_training_tasks(given).at(1)
        assert name == "mine" and isinstance(environment.environment, FunctionEnvironment)
        assert (task.question, task.answer) == ("1+1", "2")
        assert list_reward_names(given) == ("correct",)
    saved = dump_config(replace(config, env=env))
    assert f"function: {correct.__module__}:correct" in saved and "rows" not in saved

"""NeMo-Gym's own servers and agents, started by a run: ``make test-adapters`` installs the package and runs this."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loop.runs import Environ, Running, metrics_of, overrides, start, strop, tiny_config
from strop.data.sources.source import DataSource
from strop.endings import Ending
from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.extensions.adapters.nemo_gym_environment import NemoGymEnvironment
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.sampling import Sampling
from strop.types import Rollout
from support.adapter_servers import free_port, interpreter
from support.agents import TEMPLATE, Recorder, check_tree
from support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SERVERS = ("example_tool_call_multireward", "example_single_tool_call")
WEATHER, SINGLE = (f"{name}_simple_agent" for name in SERVERS)
POLICY_FILE = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


def packages() -> Path:
    return next(Path(interpreter("nemo-gym")).parents[1].glob("lib/python*/site-packages"))


def config(folder: Path) -> dict[str, Any]:
    """Return a section ``env.nemo_gym`` whose servers run in the environment that has the package, instead of one for each of them."""
    kinds = {"resources_servers": SERVERS, "responses_api_agents": ("simple_agent",), "environment_servers": ("legacy_agent",)}
    for kind, names in kinds.items():
        for name in names:
            (folder / "venvs" / kind / name).mkdir(parents=True)
            (folder / "venvs" / kind / name / ".venv").symlink_to(Path(interpreter("nemo-gym")).parents[1])
    files = [POLICY_FILE, *(f"resources_servers/{name}/configs/{name}.yaml" for name in SERVERS)]
    low = free_port()
    ports = {"port_range_low": low, "port_range_high": low + 200}
    return {"config_paths": files, "skip_venv_if_present": True, "uv_venv_dir": str(folder / "venvs"), **ports}


def rows(folder: Path) -> Path:
    """Write the example data of both servers, each row with its agent."""
    found = []
    for name, agent in zip(SERVERS, (WEATHER, SINGLE), strict=True):
        file = packages() / "resources_servers" / name / "data" / "example.jsonl"
        found += [{**json.loads(line), "agent_ref": {"name": agent}} for line in file.read_text().splitlines()[:4]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder / "rows.jsonl"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(packages()))  # its own packages come before those of Strop


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose environment or command names the folder, without this one and its run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder / "venvs").encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def solve(environment: NemoGymEnvironment, task: Any, *texts: str, max_length: int = 4000) -> tuple[Rollout, Recorder]:
    generator = Recorder(*texts)
    rules = EpisodeRules(max_turns=20, max_length=max_length)
    rollout = asyncio.run(
        run_episode(
            LocalEnvironment(environment), task, 0, 1,
            generator=generator, template=TEMPLATE, sampling=Sampling(max_new_tokens=200), rules=rules,
        )
    )  # fmt: skip
    return rollout, generator


@pytest.fixture
def started(tmp_path: Path, environ: None) -> Iterator[NemoGymEnvironment]:
    section = config(tmp_path)
    section["policy_model_thinking"] = {
        "_copy": "policy_model",
        "responses_api_models": {"vllm_model": {"chat_template_kwargs": {"enable_thinking": True}}},
    }
    section[SINGLE] = {"responses_api_agents": {"simple_agent": {"model_server": {"name": "policy_model_thinking"}}}}
    environment = make_environment("nemo_gym", {"config": section, "python": interpreter("nemo-gym")})
    assert isinstance(environment, NemoGymEnvironment)
    yield environment
    environment.process.close()
    assert not processes_of(tmp_path)


def test_agents_of_nemo_gym_ask_the_gateway_and_their_servers_score_exactly_what_the_policy_sampled(started, tmp_path):
    tasks = started.tasks(DataSource(dataset_name=str(rows(tmp_path))))
    rollout, generator = solve(started, tasks[0], call("get_weather", city="San Francisco"), "It is cold.")
    assert rollout.error is None and rollout.rewards == {"score": 2.0} and rollout.metrics["component/schema_valid"] == 1.0
    check_tree(rollout, generator.sampled)
    room = rollout.length - len(rollout.turns[-1].tokens)
    rollout, _ = solve(started, tasks[0], call("get_weather", city="San Francisco"), "x", max_length=room)
    assert rollout.ending == Ending.CONTEXT and rollout.rewards["score"] >= 1.0  # scored as far as it came
    rollout, generator = solve(started, tasks[4], call("get_weather", city="x"), "It is cold.")
    assert rollout.rewards == {"score": 1.0}
    check_tree(rollout, generator.sampled)

    (server,) = [pid for pid in processes_of(tmp_path) if b"example_single_tool_call\0" in config_path_of(pid)]
    os.kill(server, signal.SIGKILL)
    rollout, _ = solve(started, tasks[4], call("get_weather", city="x"), "It is cold.")
    assert rollout.ending == Ending.SERVICE and "`example_single_tool_call` finished unexpectedly" in str(rollout.error)
    with pytest.raises(EnvironmentConfigError, match=f"did you mean '{SINGLE}'"):
        started.tasks(DataSource(rows=[{"responses_create_params": {}, "agent_ref": {"name": SINGLE + "s"}}]))


def config_path_of(pid: int) -> bytes:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((entry + b"\0" for entry in entries if entry.startswith(b"NEMO_GYM_CONFIG_PATH=")), b"").partition(b"=")[2]


def recipe(folder: Path) -> Path:
    """Write a recipe as NeMo-RL has them."""
    values = {
        "grpo": {"max_rollout_turns": 1, "max_val_samples": None, "val_batch_size": None},
        "policy": {
            "generation": {
                "backend": "torch",
                "vllm_cfg": {"expose_http_server": True, "http_server_serving_chat_kwargs": {"enable_auto_tools": True}},
            }
        },
        "data": {
            "train": {"data_path": str(rows(folder))},
            "default": {"dataset_name": "NemoGymDataset", "env_name": "nemo_gym", "processor": "nemo_gym_data_processor"},
        },
        "env": {
            "should_use_nemo_gym": True,
            "should_mask_flagged_samples": True,
            "nemo_gym": {
                **config(folder),
                "is_trajectory_collection": False,
                "policy_model": {"responses_api_models": {"vllm_model": {"uses_reasoning_parser": False}}},
            },
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


SHORT = {
    **{f"env__arithmetic__{name}": ... for name in ("max_operand", "wording")},
    **{f"data__{name}": ... for name in ("train__env_name", "validation__env_name", "validation__size")},
    "data__max_input_seq_length": 1000,
    "policy__max_total_sequence_length": 1024,
    "policy__tokenizer__tool_call_format": "hermes",
    "grpo__num_prompts_per_step": 4,
    "grpo__num_generations_per_prompt": 2,
    "grpo__max_num_steps": 2,
    "grpo__val_period": 0,
    "checkpointing__enabled": False,
    "checkpointing__metric_name": None,
}


def arguments(tiny: Path, folder: Path, **changes: Any) -> list[str]:
    settings = overrides(tiny_config(tiny, **{**SHORT, "env__nemo_gym__python": interpreter("nemo-gym"), **changes}))
    return ["grpo", "--config", str(recipe(folder)), *settings]


def test_a_recipe_trains_two_steps_on_a_blend_of_two_servers_and_leaves_no_process(tiny, tmp_path):
    variables = Environ({"NEMO_GYM_EXTRA_ROOTS": str(packages())})
    outcome = strop(*arguments(tiny, tmp_path), folder=tmp_path / "run", before=variables, timeout=300)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "run" / "logs")
    assert set(metrics) == {1, 2} and metrics[1]["train/groups_dropped_for_errors"] == 0
    assert metrics[2]["train/environments/nemo_gym/gateway/requests"] >= 1
    assert "train/environments/nemo_gym/verify/reward" in metrics[1]
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_servers_end_with_a_run_that_is_interrupted_or_killed(how, tiny, tmp_path):
    variables = Environ({"NEMO_GYM_EXTRA_ROOTS": str(packages())})
    run: Running = start(arguments(tiny, tmp_path, grpo__max_num_steps=1000), tmp_path / "run", before=variables)
    try:
        assert wait_until(lambda: (tmp_path / "run/logs").exists() and len(metrics_of(tmp_path / "run/logs")) > 0, 300)
        assert len(processes_of(tmp_path)) >= 6
    finally:
        os.kill(run.process.pid, how)
        run.finish(60)
    assert wait_until(lambda: not processes_of(tmp_path), 20)

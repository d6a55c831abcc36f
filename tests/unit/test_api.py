"""The stable interface: its names, how arguments become settings, a running event loop, results as data frames."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import strop
from strop import cli
from strop.algorithm_factory import all_algorithms, make_algorithm, name_options
from strop.api import run_anywhere
from strop.config import ConfigError, dump_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.runs import train as training
from strop.runs.run_algorithm import find_section
from support.each import each

SURFACE = [
    *(
        "Algorithm",
        "Batch",
        "Comparison",
        "ConfigError",
        "DataSource",
        "Environment",
        "Evaluation",
        "Group",
        "Message",
        "Plan",
        "Rollout",
    ),
    *("Run", "RunStopped", "Task", "__version__", "compare", "evaluate", "load_config", "reward", "train"),
]
ROWS = [{"problem": "1+1", "answer": "2"}, {"problem": "1+2", "answer": "3"}]


def correct(task: strop.Task, rollout: strop.Rollout) -> bool:
    return task.answer in rollout.text


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The configurations that would be trained, in place of training."""
    configs: list[Any] = []

    async def train(config: Any) -> None:
        configs.append(config)
        folder = Path(config.logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train_as_configured", train)
    return configs


def test_the_stable_names_are_these_and_no_others() -> None:
    assert sorted(strop.__all__) == sorted(SURFACE)
    assert all(getattr(strop, name) is not None for name in SURFACE if name != "Comparison")  # which an extension has
    assert set(SURFACE) <= set(dir(strop))
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        strop.tain  # type: ignore[attr-defined]  # noqa: B018


def test_the_page_documents_every_stable_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in SURFACE if f"`strop.{name}`" not in page and name != "__version__"] == []


@pytest.mark.extensions
def test_a_run_without_a_folder_gets_a_new_one_each_time(trained: list[Any]) -> None:
    folders = {str(strop.train("sft", model="m", data=[{"messages": []}]).folder) for _ in range(3)}
    assert len(folders) == 3 and all(folder.startswith("results/sft-") for folder in folders)
    strop.train("sft", model="m", data=ROWS, **{"logger.log_dir": "mine"})
    assert trained[-1].logger.log_dir == "mine"


@pytest.mark.extensions
def test_several_rewards_go_by_name_and_an_environment_by_its_class(trained: list[Any]) -> None:
    strop.train("grpo", model="m", data=ROWS, reward={"correct": correct, "short": {"function": correct, "weight": 0.1}})
    assert trained[-1].env["task"].options["rewards"]["short"]["weight"] == 0.1
    strop.train("grpo", model="m", data=ROWS, environment="math")
    assert trained[-1].env["task"].type == "math"
    with pytest.raises(ValueError, match="give one of them"):
        strop.train("grpo", model="m", data=ROWS, reward=correct, environment="math")


def test_an_environment_may_make_its_tasks_and_a_reward_is_never_left_out(trained: list[Any]) -> None:
    quickstart = Path(__file__).parents[2] / "examples" / "configs" / "quickstart.yaml"
    strop.train("grpo", environment="arithmetic", model="m")
    assert [entry.env_name for entry in trained[-1].data.train] == ["task"]
    strop.train("grpo", config=quickstart, data=ROWS, reward=correct)
    assert trained[-1].data.train[0].env_name == "task" and trained[-1].data.train[0].rows is ROWS
    with pytest.raises(
        ValueError, match=r"the reward would not be used: data\.train\.env_name is arithmetic in the file; give data too"
    ):
        strop.train("grpo", config=quickstart, reward=correct)


def test_mistakes_are_refused_with_the_key_and_a_way_out(trained: list[Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"Python: grpo\.max_num_stepz: there is no such key\s+Did you mean grpo\.max_num_steps"
    ):
        strop.train("grpo", model="m", data=ROWS, reward=correct, **{"grpo.max_num_stepz": 3})
    with pytest.raises(ConfigError, match=r"env has nothing[\s\S]* such as env\.task\.reward=rewards\.py:correct"):
        strop.train("grpo", model="m", data=ROWS)
    with pytest.raises(ValueError, match=r"algorithm\.name: 'gpro' is neither .* did you mean 'gspo'"):
        strop.train("gpro", model="m", data=ROWS, reward=correct)
    assert not trained


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy.optimizer.kwargs": {"lrr": 1e-5}}, "lrr"),
        ({"policy.optimizer.name": "torch.optim.Adamm"}, "Adamm"),
        ({"policy.dtensor_cfg.lora_cfg": {"enabled": True, "target_modules": ["no_such_layer"]}}, "no_such_layer"),
        ({"policy.tokenizer.chat_template": "{% if %}"}, "chat_template"),
        (
            {"policy.max_total_sequence_length": 100_000_000, "policy.model_name": "no/such/folder"},
            "there is no folder no/such/folder",
        ),
    ],
)
def test_python_refuses_before_anything_is_loaded_what_the_command_line_refuses(
    settings: dict[str, Any], said: str, trained: list[Any], tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("talks.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]})
    )
    values = {
        "policy.model_name": str(tiny_model_folder),
        "data.train.dataset_name": "talks.jsonl",
        "sft.val_period": 0,
        **settings,
    }
    with pytest.raises(ConfigError, match=said) as refused:
        strop.train("sft", **values)
    assert not trained
    assert cli.main(["sft", *(f"{key}={json.dumps(value)}" for key, value in values.items())]) == 2
    printed = capsys.readouterr().err
    assert all(problem.message in printed for problem in refused.value.problems)


@each("name", sorted(all_algorithms()))
def test_an_algorithm_object_is_the_same_as_its_name_and_options(name: str) -> None:
    algorithm = all_algorithms()[name]()
    found, options = name_options(algorithm)
    assert found == name and make_algorithm(found, options) == algorithm
    assert find_section(name) in ("grpo", "ppo", "distillation", "sft", "dpo", "rm")


def test_a_running_event_loop_is_no_obstacle() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def notebook() -> str:
        return run_anywhere(work())

    assert run_anywhere(work()) == "MainThread" and asyncio.run(notebook()) == "strop-run"


def test_an_error_of_the_run_reaches_the_notebook() -> None:
    async def work() -> None:
        raise strop.RunStopped("SIGTERM")

    async def notebook() -> None:
        run_anywhere(work())

    with pytest.raises(strop.RunStopped):
        asyncio.run(notebook())


def test_an_interrupt_in_a_notebook_cancels_the_run() -> None:
    code = """
import asyncio, os, signal, threading
from strop.api import run_anywhere
async def work():
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        print("cancelled")
        raise
async def notebook():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_anywhere(work())
try:
    asyncio.run(notebook())
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["cancelled", "interrupted"], done.stderr


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        strop.Run(tmp_path)
    (tmp_path / "config.yaml").write_text(f"checkpointing: {{checkpoint_dir: {tmp_path / 'steps'}}}\n")
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "metrics": {"train/loss": 1 / s}}) + "\n" for s in (1, 2))
    )
    run = strop.Run(tmp_path)
    assert run.checkpoint is None and run.model is None and len(run.rollouts) == 0
    for step in (2, 10):
        (tmp_path / "steps" / f"step_{step}").mkdir(parents=True)
    assert run.checkpoint == tmp_path / "steps" / "step_10" and len(RolloutStore(tmp_path, "none").steps()) == 0


def test_what_cannot_be_compared_is_refused() -> None:
    a = strop.Evaluation({}, [], tasks=[{"task": "1", "samples": [{"accuracy": 1.0}]}])
    with pytest.raises(ValueError, match="give both by name"):
        strop.compare(a, "logs/mine")
    with pytest.raises(ValueError, match="no samples to compare"):
        strop.compare(a, strop.Evaluation({}, []))

"""Several sets in one evaluation, where samples are kept, and how an interrupted one continues."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.runs.jobs.task_log import TaskLog
from support.saved_runs import save_run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("small", 3), ("large", 5)):
        lines = ({"problem": f"{n}+{n}=", "answer": str(2 * n), "subject": "even" if n % 2 else "odd"} for n in range(rows))
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def arguments(model: Path, *more: str) -> list[str]:
    keys = [
        f"generation.model_name={model}", "generation.max_new_tokens=4", "generation.vllm_cfg.max_model_len=64",
        "generation.device=cpu", "generation.precision=float32", "generation.num_threads=1", "generation.temperature=1.0",
        "generation.torch_cfg.kv_cache_memory_gb=0.01", "eval.num_tests_per_prompt=4", "eval.k_value=2",
        "env.task.reward=mine.py:short",
    ]  # fmt: skip
    Path("mine.py").write_text("def short(task, rollout):\n    return float(len(rollout.text) < 5)\n")
    return [*keys, *more]


def evaluate(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    code = cli.main(["eval", "--json", *given])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    found["said"] = captured.err
    return found


def comparable(found: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found["metrics"].items() if not name.endswith("seconds")}


@pytest.mark.parametrize("names", ["[small.jsonl,large.jsonl]", "small.jsonl,large.jsonl"])
def test_each_set_has_metrics_of_its_own_and_their_plain_mean_is_reported(
    names: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(capsys, *arguments(tiny_model_folder, f"data.dataset_name={names}"))
    metrics = found["metrics"]
    assert found["sets"] == {"small": 3, "large": 5} and found["tasks"] == 8
    for name in ("accuracy", "pass@2", "reward", "avg_length"):
        assert metrics[name] == pytest.approx((metrics[f"small/{name}"] + metrics[f"large/{name}"]) / 2)
        low, high = found["confidence_intervals"][name]
        assert low <= metrics[name] <= high
    stored = json.loads(Path(found["stored_in"]).read_text())
    assert [task["set"] for task in stored["tasks"]] == ["small"] * 3 + ["large"] * 5
    assert stored["metrics"] == comparable(found)
    alone = evaluate(capsys, *arguments(tiny_model_folder, "data.dataset_name=large.jsonl"))
    assert all(alone["metrics"][name] == metrics[f"large/{name}"] for name in comparable(alone))


def test_sets_inherit_the_keys_of_data_and_have_samples_and_a_temperature_of_their_own(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sets.yaml").write_text(
        "eval: {}\ndata:\n  size: 2\n  sets:\n    - {dataset_name: small.jsonl, num_tests_per_prompt: 1, temperature: 0.0}\n"
        "    - {dataset_name: large.jsonl, name: big, size: 4}\n"
    )
    found = evaluate(capsys, "--config", "sets.yaml", *arguments(tiny_model_folder, "eval.k_value=1"))
    assert found["sets"] == {"small": 2, "big": 4} and "big/avg@4" in found["metrics"] and "small/avg@4" not in found["metrics"]
    assert cli.main(["eval", "--config", "sets.yaml", *arguments(tiny_model_folder)]) == 2
    assert "fewer than eval.k_value = 2" in capsys.readouterr().err
    assert cli.main(["eval", "--config", "sets.yaml", "--dry-run", *arguments(tiny_model_folder, "eval.k_value=1")]) == 0
    out = capsys.readouterr().out
    assert "small.jsonl, 3 rows (task), 1 a task, temperature 0" in out and "large.jsonl, 5 rows (task)" in out


def test_a_run_is_evaluated_on_several_other_sets(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = save_run(tmp_path, tiny_model_folder, steps=(4,))
    Path("mine.py").write_text("def short(task, rollout):\n    return 1.0\n")
    more = ["env.task.reward=mine.py:short", "data.env_name=task"]
    found = evaluate(capsys, str(logs), "data.dataset_name=[small.jsonl,large.jsonl]", *more)
    assert found["sets"] == {"small": 3, "large": 5} and found["metrics"]["small/accuracy"] == 1.0


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Press Ctrl-C when ``count`` tasks of an evaluation are finished. What ends while it is cleaned up is not kept."""
    add, interrupts = TaskLog.add, [signal.SIGINT]

    def interrupting(log: TaskLog, name: str, index: int, task: dict[str, Any]) -> None:
        if log.count < count:
            add(log, name, index, task)
        elif interrupts:
            signal.raise_signal(interrupts.pop())

    monkeypatch.setattr(TaskLog, "add", interrupting)


@pytest.mark.parametrize("named", [True, False])
def test_the_same_command_continues_an_interrupted_evaluation_to_the_same_numbers(
    named: bool, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tiny_model_folder, "data.dataset_name=[small.jsonl,large.jsonl]", "eval.save_logprobs=true")
    whole = evaluate(capsys, *given, "eval.save_path=whole")
    command = [*given, *(["eval.save_path=parts"] if named else [])]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert cli.main(["eval", *command]) == 130
    assert "The same command continues" in capsys.readouterr().err
    (tasks,) = Path().glob("parts/tasks.jsonl" if named else "results/evals/*/*/tasks.jsonl")
    parts = evaluate(capsys, *command)
    assert "4 tasks are finished" in parts["said"] and Path(parts["stored_in"]).parent == tasks.parent
    assert comparable(parts) == comparable(whole) and parts["confidence_intervals"] == whole["confidence_intervals"]
    stored = [json.loads(Path(each["stored_in"]).read_text())["tasks"] for each in (whole, parts)]
    assert stored[0] == stored[1] and len(stored[0][0]["samples"][0]["logprobs"]) == stored[0][0]["samples"][0]["tokens"]
    assert not tasks.exists(), "the result has it all"
    again = evaluate(capsys, *command)
    assert "finished" not in again["said"] and (Path(again["stored_in"]).parent == tasks.parent) == named
    assert comparable(again) == comparable(whole)


def test_what_a_prompt_file_says_and_the_temperature_of_several_sets_start_anew(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ask.txt").write_text("Q: {question}")
    given = arguments(
        tiny_model_folder, "data.dataset_name=[small.jsonl,large.jsonl]", "data.prompt_file=ask.txt", "eval.save_path=mine"
    )
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert cli.main(["eval", *given]) == 130
    Path("ask.txt").write_text("{question}=")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert cli.main(["eval", *given]) == 130
    assert 'small: prompt: "Q: {question}" -> "{question}="' in capsys.readouterr().out
    said = evaluate(capsys, *given, "generation.temperature=0.5")["said"]
    assert "small: temperature: 1.0 -> 0.5" in said and "tasks are finished" not in said


def test_the_result_says_how_it_was_sampled_and_scored(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, *arguments(tiny_model_folder, "data.dataset_name=[small.jsonl,large.jsonl]"))
    identity = json.loads(Path(found["stored_in"]).read_text())["identity"]
    assert identity["settings"]["model"] == str(tiny_model_folder) and identity["settings"]["engine"] == "torch"
    assert [name for name, _, _ in identity["settings"]["model files"]].count("model.safetensors") == 1
    assert list(identity["sets"]) == ["small", "large"]
    large = identity["sets"]["large"]
    assert (large["samples"], large["temperature"], large["prompt"]) == (4, 1.0, "{question}")
    assert large["env.task"]["reward"] and large["data file"][0][0] == "large.jsonl"


def test_an_environment_that_answers_the_policy_is_played_to_its_end(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("thrice.py").write_text(
        "import string\n"
        "from strop.environments.base import DatasetEnvironment, reward\n"
        "from strop.types import user\n"
        "class Thrice(DatasetEnvironment):\n"
        "    def stop_strings(self, task, rollout):\n        return list(string.printable)\n"
        "    async def respond(self, task, rollout):\n"
        "        return (user('again'),) if len(rollout.policy_turns) < 3 else None\n"
        "    @reward()\n"
        "    def turns(self, task, rollout):\n        return float(len(rollout.policy_turns))\n"
    )
    given = [text for text in arguments(tiny_model_folder, "data.dataset_name=small.jsonl") if not text.startswith("env.")]
    given = [text.replace("max_new_tokens=4", "max_new_tokens=20") for text in given]
    given += ["env.mine.type=thrice.py:Thrice", "generation.vllm_cfg.max_model_len=200", "eval.num_tests_per_prompt=8"]
    played = json.loads(Path(evaluate(capsys, *given)["stored_in"]).read_text())
    turns = [sum(turn["sampled"] for turn in sample["turns"]) for task in played["tasks"] for sample in task["samples"]]
    assert max(turns) == 3
    limited = evaluate(capsys, *given, "eval.max_rollout_turns=1")
    assert limited["metrics"]["reward"] <= 1.0

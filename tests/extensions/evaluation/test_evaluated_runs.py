"""``strop eval`` and ``strop.evaluate`` on what runs left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import strop as api
from loop.runs import grpo, metrics_of, overrides, strop

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {
    "policy.dtensor_cfg.lora_cfg.enabled": True,
    "policy.dtensor_cfg.lora_cfg.dim": 4,
    "policy.optimizer.kwargs.lr": 0.02,
    "grpo.max_num_steps": 2,
}
WITHOUT_ANSWERS = """
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Task

class Mine(Environment[Task]):
    def tasks(self, data):
        return GeneratedTasks(100, lambda index: Task(id=str(index), question=str(index)))

    @reward()
    def length(self, task, rollout):
        return 1.0
"""


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    outcome = grpo(tiny, folder, **{"grpo.max_num_steps": 2, "grpo.val_num_generations_per_prompt": 2})
    assert outcome.code == 0, outcome.err
    return folder


def evaluation(model: Path, **changes) -> list[str]:
    settings = {
        "generation.model_name": str(model),
        "generation.vllm_cfg.max_model_len": 64,
        "generation.precision": "float32",
        "generation.device": "cpu",
        "generation.num_threads": 1,
        "generation.temperature": 1.0,
        "generation.max_new_tokens": 4,
        "generation.torch_cfg.kv_cache_memory_gb": 0.01,
        "eval.num_tests_per_prompt": 4,
        "eval.k_value": 2,
        "eval.save_path": "evaluation",
        "data.env_name": "arithmetic",
        "data.max_input_seq_length": 60,
        "data.size": 8,
        "env.arithmetic.max_operand": 3,
        "env.arithmetic.wording": "{expression}=",
    }
    return overrides({**settings, **changes})


def test_a_checkpoint_is_evaluated(run):
    model = run / "results" / "step_2" / "policy" / "weights"
    outcome = strop("eval", *evaluation(model, **{"eval.metric": "cons@k"}), folder=run)
    assert outcome.code == 0, outcome.err
    written = json.loads((run / "evaluation" / "step_000000.json").read_text())
    assert len(written["tasks"]) == 8 and all(len(task["samples"]) == 4 for task in written["tasks"])
    assert {"accuracy", "pass@1", "pass@2", "pass@4", "avg@4", "cons@2", "cons@4"} <= written["metrics"].keys()
    assert f"\ncons@2 = {written['metrics']['cons@2']:.4f}\n" in outcome.out


def test_an_evaluation_is_repeated_exactly_and_its_batching_changes_nothing(run):
    model, found = run / "results" / "step_2" / "policy" / "weights", []
    for folder, changes in [("a", {}), ("b", {}), ("c", {"generation.num_prompts_per_step": 3})]:
        outcome = strop("eval", *evaluation(model, **{"eval.save_path": folder, **changes}), folder=run)
        assert outcome.code == 0, outcome.err
        found.append(json.loads((run / folder / "step_000000.json").read_text()))
    assert found[0] == found[1]
    assert [task["samples"] for task in found[2]["tasks"]] == [task["samples"] for task in found[0]["tasks"]]


def test_a_run_is_evaluated_without_any_key_as_it_validated_itself(run, tmp_path):
    """Sampled, with the seeds of the run, and from another folder than the one it was started in."""
    outcome = strop("eval", str(run / "logs"), "--json", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    step = found["step"]
    logged = metrics_of(run / "logs")[step]
    for name in ("accuracy", "reward", "avg_length", "truncated", "errors"):
        assert found["metrics"][name] == logged[f"validation/{name}"], name
    inside = json.loads((run / "logs" / "validation" / f"step_{step:06d}.json").read_text())
    alone = json.loads(Path(found["stored_in"]).read_text())
    assert [sampled(task) for task in inside["tasks"]] == [sampled(task) for task in alone["tasks"]]


def sampled(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a task without the versions of the weights: a loaded checkpoint begins at 0."""
    turns = [[{**turn, "versions": None} for turn in sample["turns"]] for sample in task["samples"]]
    return [{**sample, "turns": own} for sample, own in zip(task["samples"], turns, strict=True)]


def test_what_is_saved_is_evaluated_under_the_name_of_its_folder(tiny: Path, tmp_path: Path) -> None:
    """As the base with its adapters merged: the same answers as from the exported model."""
    outcome = grpo(tiny, tmp_path, **LORA)
    assert outcome.code == 0, outcome.err
    adapters = tmp_path / "results" / "step_2" / "policy" / "weights"
    assert strop("export", str(adapters), str(tmp_path / "merged"), "--merge", folder=tmp_path).code == 0
    assert (tmp_path / "merged" / "model.safetensors").exists()
    found = {}
    for name, model in {"adapters": adapters, "merged": tmp_path / "merged"}.items():
        settings = {
            "generation.model_name": str(model),
            "generation.vllm_cfg.max_model_len": 64,
            "generation.precision": "float32",
            "generation.device": "cpu",
            "generation.num_threads": 1,
            "generation.max_new_tokens": 4,
            "generation.torch_cfg.kv_cache_memory_gb": 0.01,
            "data.env_name": "arithmetic",
            "data.max_input_seq_length": 60,
            "data.size": 8,
            "env.arithmetic.max_operand": 3,
            "env.arithmetic.wording": "{expression}=",
            "eval.save_path": f"evaluation_{name}",
        }
        outcome = strop("eval", *overrides(settings), folder=tmp_path)
        assert outcome.code == 0, outcome.err
        found[name] = json.loads((tmp_path / f"evaluation_{name}" / "step_000000.json").read_text())
    of_adapters, of_merged = (saved.pop("identity") for saved in (found["adapters"], found["merged"]))
    assert found["adapters"] == found["merged"]
    other = {key for key, value in of_adapters["settings"].items() if of_merged["settings"][key] != value}
    assert other == {"model", "model files", "tokenizer"} and of_adapters["sets"] == of_merged["sets"]


@pytest.mark.exhaustive
def test_a_trained_run_is_evaluated(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "1+2", "answer": "3"}]
    small = {"grpo.num_prompts_per_step": 2, "grpo.num_generations_per_prompt": 2, "policy.max_total_sequence_length": 48}
    run = api.train("grpo", model=tiny, data=rows, validation=rows, reward=correct, folder="run", **small)  # type: ignore[arg-type]
    assert run.step == 1 and run.checkpoint == Path("run/checkpoints/step_1")
    again = api.train("grpo", model=tiny, data=rows, validation=rows, reward=correct, folder="run", **small)  # type: ignore[arg-type]
    assert again.metrics.equals(run.metrics)
    scores = api.evaluate(
        run, data=rows, reward=correct, samples=2, **{"generation.temperature": 1.0, "generation.max_new_tokens": 8}
    )
    assert set(scores.metrics) >= {"accuracy", "avg@2", "pass@2"} and len(scores.samples) == 4
    assert scores.accuracy == scores.samples["accuracy"].mean()


def correct(task: strop.Task, rollout: strop.Rollout) -> bool:
    return task.answer in rollout.text


def test_the_evaluation_starter_scores_every_task_and_keeps_the_samples(tiny: Path, tmp_path: Path) -> None:
    assert strop("init", "eval", "--model", str(tiny), folder=tmp_path).code == 0
    changes = ["data.size=3", "generation.max_new_tokens=4", "generation.vllm_cfg.max_model_len=400", "generation.device=cpu"]
    outcome = strop("eval", "--config", "eval.yaml", *changes, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "pass@4" in outcome.out
    (saved,) = (tmp_path / "results" / "eval").rglob("*.json")
    assert len(json.loads(saved.read_text())["tasks"]) == 3


def test_a_vote_without_answers_to_vote_on_is_refused(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(WITHOUT_ANSWERS)
    settings = {
        "generation.model_name": str(tiny),
        "generation.vllm_cfg.max_model_len": 64,
        "generation.precision": "float32",
        "generation.max_new_tokens": 4,
        "generation.torch_cfg.kv_cache_memory_gb": 0.01,
        "data.env_name": "mine",
        "data.max_input_seq_length": 60,
        "data.size": 4,
        "env.mine.type": "mine.py:Mine",
        "eval.metric": "cons@k",
    }
    outcome = strop("eval", *overrides(settings), folder=tmp_path)
    assert outcome.code == 1 and outcome.err.startswith("error: ") and "Traceback" not in outcome.err
    said = outcome.err
    assert "votes on final answers, and the environment defines no answer_key" in said

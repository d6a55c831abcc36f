"""``strop eval RUN_OR_CHECKPOINT``: what a run validates on, for a checkpoint of any layout."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, RolloutRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.evaluation import evaluate as evaluate_module
from strop.extensions.evaluation.evaluated_run import load_evaluated_run
from strop.extensions.evaluation.evaluation_folder import TaskLog
from strop.runs.evaluation_job import identify_entries, make_validation_job
from support.saved_runs import CONFIG, save_run

RECORDED = """
policy:
  model_name: {model}
  max_total_sequence_length: 64
  precision: float32
  device: cpu
  num_threads: 1
%s
logger: {{log_dir: logs/mine}}
checkpointing: {{checkpoint_dir: results/mine}}
"""


@pytest.fixture
def logs(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save_run(tmp_path, tiny_model_folder).relative_to(tmp_path)


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = cli.main(["eval", "--json", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_a_run_is_evaluated_on_what_it_validates_on_without_any_key(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(logs)]) == 0
    out = capsys.readouterr().out
    assert "step 4" in out and "arithmetic, at most 6 tasks (grpo.max_val_samples)" in out
    assert "\naccuracy " in out and " ± " in out and "6 tasks, 1 sample each" in out and "validation/" not in out
    assert out.count(" -> ") == 3 and "(reward " in out
    (stored,) = (logs / "evaluations").glob("*/step_000004.json")
    assert f"every sample is in {stored}" in out and len(json.loads(stored.read_text())["tasks"]) == 6


OF_THE_MODEL = {"model", "model files", "step", "tokenizer"}  # of a checkpoint and of its run


def changed_settings(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    assert {**one, "settings": None} == {**other, "settings": None}
    return {name for name in one["settings"] | other["settings"] if one["settings"].get(name) != other["settings"].get(name)}


def test_an_evaluation_of_a_run_is_sampled_and_scored_as_its_validation_says(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(logs / "config.yaml", root=TRAINING_RUNS["grpo"]).config
    assert isinstance(config, RolloutRunConfig)
    validation = identify_entries(make_validation_job(config, SavedModel(str(logs)))).to_json()
    found = json.loads(Path(evaluate(capsys, str(logs))["stored_in"]).read_text())["identity"]
    assert changed_settings(validation, found) == OF_THE_MODEL and found["settings"]["step"] == 4
    tokenizers = [each["settings"]["tokenizer"] for each in (validation, found)]
    assert tokenizers[1] == {**tokenizers[0], "name": found["settings"]["model"]}, "the one that is saved with the model"
    assert validation["settings"]["model files"] == [], "they change from step to step"
    other = json.loads(Path(evaluate(capsys, str(logs), "generation.temperature=0.5")["stored_in"]).read_text())["identity"]
    found["sets"]["arithmetic"]["temperature"] = 0.5
    assert other == found


@pytest.mark.parametrize("layout", ["shards", "adapters"])
def test_checkpoints_of_every_layout_are_evaluated(
    layout: str, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same numbers as the exported model."""
    monkeypatch.chdir(tmp_path)
    logs, out = save_run(tmp_path, tiny_model_folder, layout, steps=(4,)), tmp_path / "out"
    found = evaluate(capsys, str(logs), "--ema")
    assert cli.main(["export", str(logs), str(out), "--ema", *(["--merge"] if layout == "adapters" else [])]) == 0
    capsys.readouterr()
    again = evaluate(capsys, str(out), "eval.save_path=null")
    for report in (found, again):
        report["metrics"].pop("seconds")
    assert found["metrics"] == again["metrics"] and found["step"] == 4 and again["stored_in"] is None


def test_a_run_is_found_and_evaluated_from_another_folder(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also its data file and its reward, which its configuration names relative to the folder it was started in."""
    config = CONFIG.replace("validation: {{env_name: arithmetic, size: 8}}", "validation: {{dataset_name: data/rows.jsonl}}")
    config = config.replace(
        'env: {{arithmetic: {{max_operand: 3, wording: "{{expression}}="}}}}', "env: {{task: {{reward: mine.py:long}}}}"
    )
    home = tmp_path / "home"
    save_run(
        home,
        tiny_model_folder,
        config=config.replace("train: {{env_name: arithmetic}}", "train: {{dataset_name: data/rows.jsonl}}"),
    )
    (home / "data").mkdir()
    (home / "data/rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(4))
    )
    (home / "mine.py").write_text("def long(task, rollout):\n    return float(len(rollout.text))\n")
    monkeypatch.chdir(tmp_path)
    assert evaluate(capsys, "home/logs/mine")["tasks"] == 4
    assert evaluate(capsys, "home/results/mine/step_2", "data.size=2")["tasks"] == 2


def test_keys_of_training_and_of_an_evaluation_mean_the_same(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["eval.num_tests_per_prompt=2", "generation.temperature=1.0", "data.size=5", "generation.max_new_tokens=3"]
    training = ["grpo.val_num_generations_per_prompt=2", "policy.generation.val_temperature=1.0", "data.validation.size=5"]
    found = [
        evaluate(capsys, str(logs), *own),
        evaluate(capsys, str(logs), *training, "policy.generation.max_new_tokens=3"),
        evaluate(capsys, str(logs), "policy.generation.temperature=1.0", *own[:1], *own[2:]),
    ]
    for report in found:
        report["metrics"].pop("seconds"), report.pop("stored_in")
    assert found[0] == found[1] == found[2] and found[0]["tasks"] == 5 and "pass@2" in found[0]["metrics"]
    assert cli.main(["eval", str(logs), "--dry-run", "generation.temperature=0.5", "eval.k_value=1"]) == 0
    captured = capsys.readouterr()
    assert "note: generation.temperature is read as policy.generation.val_temperature, its name in the run" in captured.err
    assert "temperature 0.5" in captured.out


def test_a_dry_run_looks_at_the_tasks_of_a_run(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    entry = {"env_name": "math", "dataset_name": "rows.jsonl", "output_key": "answer"}
    rows = ["env.math={}", *(f"data.validation.{name}={value}" for name, value in entry.items())]
    assert cli.main(["eval", str(logs), "--dry-run", *rows, "data.validation.input_key=questoin"]) == 2
    said = capsys.readouterr()
    assert "data.validation: " in said.err and "questoin" in said.err and not said.out
    assert cli.main(["eval", str(logs), "--dry-run", *rows, "data.validation.input_key=question"]) == 0
    assert "rows.jsonl" in capsys.readouterr().out
    assert not (logs / "evaluations").exists()


def test_the_best_checkpoint_and_one_of_a_step_are_evaluated(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(capsys, str(logs), "--best", "data.size=2")["step"] == 2
    assert evaluate(capsys, str(logs), "--step", "2", "data.size=2")["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["logs/mien"], "logs/mien does not exist; did you mean logs/mine?"),
        (["logs/mine", "--step", "3"], "has no checkpoint of step 3; there are: 2, 4"),
        (["logs/mine", "generation.model_name=other"], "the model is that of the run or checkpoint named first"),
        (["logs/mine", "eval.k_value=3"], "there are only eval.num_tests_per_prompt = 1 samples of a task"),
        (["logs/mine", "eval.metrc=pass@k"], "Did you mean eval.metric?"),
        (["logs/mine", "data.validation.dataset_name=nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--best"], "name one: strop eval RUN --best"),
        (["mine.yaml"], "write --config mine.yaml"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_what_to_set(
    logs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(["eval", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("layout", ["whole", "shards"])
def test_a_run_on_recorded_data_is_evaluated_by_its_loss(
    layout: str, tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(6)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = "dpo: {{}}\ndata: {{train: {{dataset_name: pairs.jsonl, split_validation_size: 4}}}}"
    logs = save_run(tmp_path, tiny_model_folder, layout, config=RECORDED % section)
    found = evaluate(capsys, str(logs))
    assert found["examples"] == 4 and found["metrics"]["loss"] != pytest.approx(math.log(2)), (
        "the policy differs from its reference"
    )
    shutil.rmtree("results/mine/step_4")
    assert evaluate(capsys, str(logs))["metrics"]["loss"] != found["metrics"]["loss"]
    sampled = evaluate(capsys, str(logs), "env.arithmetic={}", "data.size=2", "generation.vllm_cfg.max_model_len=64")
    assert sampled["tasks"] == 2 and "accuracy" in sampled["metrics"]


def test_an_evaluation_in_python_does_the_same(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import strop

    found = evaluate(capsys, str(logs))
    for model in (strop.Run(logs), logs, "results/mine/step_4"):
        scores = strop.evaluate(model)
        assert {**scores.metrics, "seconds": 0} == {**found["metrics"], "seconds": 0}
        assert scores.standard_errors == found["standard_errors"] and len(scores.samples) == 6
    scores = strop.evaluate(strop.Run(logs), data=[{"prompt": "1+1", "answer": "2"}], reward=lambda task, rollout: 1.0, samples=2)
    assert len(scores.samples) == 2 and scores.metrics["reward"] == 1.0


def test_a_run_that_validates_on_several_data_reports_each(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = "validation: [{{env_name: arithmetic, size: 3}}, {{env_name: other, size: 2}}]"
    config = CONFIG.replace("validation: {{env_name: arithmetic, size: 8}}", entries)
    config = config.replace("env: {{", "env: {{other: {{type: arithmetic}}, ")
    found = evaluate(capsys, str(save_run(tmp_path, tiny_model_folder, config=config, steps=(4,))))
    assert found["tasks"] == 5 and {"arithmetic/accuracy", "other/accuracy"} <= found["standard_errors"].keys()


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


def evaluate_sets(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
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
    found = evaluate_sets(capsys, *arguments(tiny_model_folder, f"data.dataset_name={names}"))
    metrics = found["metrics"]
    assert found["sets"] == {"small": 3, "large": 5} and found["tasks"] == 8
    for name in ("accuracy", "pass@2", "reward", "avg_length"):
        assert metrics[name] == pytest.approx((metrics[f"small/{name}"] + metrics[f"large/{name}"]) / 2)
        low, high = found["confidence_intervals"][name]
        assert low <= metrics[name] <= high
    stored = json.loads(Path(found["stored_in"]).read_text())
    assert [task["set"] for task in stored["tasks"]] == ["small"] * 3 + ["large"] * 5
    assert stored["metrics"] == comparable(found)
    alone = evaluate_sets(capsys, *arguments(tiny_model_folder, "data.dataset_name=large.jsonl"))
    assert all(alone["metrics"][name] == metrics[f"large/{name}"] for name in comparable(alone))


def test_sets_inherit_the_keys_of_data_and_have_samples_and_a_temperature_of_their_own(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sets.yaml").write_text(
        "eval: {}\ndata:\n  size: 2\n  sets:\n    - {dataset_name: small.jsonl, num_tests_per_prompt: 1, temperature: 0.0}\n"
        "    - {dataset_name: large.jsonl, name: big, size: 4}\n"
    )
    found = evaluate_sets(capsys, "--config", "sets.yaml", *arguments(tiny_model_folder, "eval.k_value=1"))
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
    found = evaluate_sets(capsys, str(logs), "data.dataset_name=[small.jsonl,large.jsonl]", *more)
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
    whole = evaluate_sets(capsys, *given, "eval.save_path=whole")
    command = [*given, *(["eval.save_path=parts"] if named else [])]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert cli.main(["eval", *command]) == 130
    assert "The same command continues" in capsys.readouterr().err
    (tasks,) = Path().glob("parts/tasks.jsonl" if named else "results/evals/*/*/tasks.jsonl")
    parts = evaluate_sets(capsys, *command)
    assert "4 tasks are finished" in parts["said"] and Path(parts["stored_in"]).parent == tasks.parent
    assert comparable(parts) == comparable(whole) and parts["confidence_intervals"] == whole["confidence_intervals"]
    stored = [json.loads(Path(each["stored_in"]).read_text())["tasks"] for each in (whole, parts)]
    assert stored[0] == stored[1] and len(stored[0][0]["samples"][0]["logprobs"]) == stored[0][0]["samples"][0]["tokens"]
    assert not tasks.exists(), "the result has it all"
    again = evaluate_sets(capsys, *command)
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
    said = evaluate_sets(capsys, *given, "generation.temperature=0.5")["said"]
    assert "small: temperature: 1.0 -> 0.5" in said and "tasks are finished" not in said


def test_the_result_says_how_it_was_sampled_and_scored(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate_sets(capsys, *arguments(tiny_model_folder, "data.dataset_name=[small.jsonl,large.jsonl]"))
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
    played = json.loads(Path(evaluate_sets(capsys, *given)["stored_in"]).read_text())
    turns = [sum(turn["sampled"] for turn in sample["turns"]) for task in played["tasks"] for sample in task["samples"]]
    assert max(turns) == 3
    limited = evaluate_sets(capsys, *given, "eval.max_rollout_turns=1")
    assert limited["metrics"]["reward"] <= 1.0


def test_other_data_of_a_run_are_asked_as_they_are_reported_unless_the_run_has_a_prompt_file(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{question}")
    for given, expected in (("null", "auto"), (str(prompt), str(prompt))):
        file = tmp_path / "config.yaml"
        train = f"{{dataset_name: gsm8k, prompt_file: {given}}}"
        sizes = "grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2}\npolicy: {model_name: m, train_global_batch_size: 4}\n"
        file.write_text(f"{sizes}data: {{train: {train}}}\nenv: {{math: {{}}}}\n")
        (entry,) = load_evaluated_run(file, ["data.dataset_name=math500"]).config.data.validation_entries
        assert (entry.dataset_name, entry.prompt_file, entry.env_name) == ("math500", expected, "math500")


def test_the_script_of_examples_is_strop_eval_with_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EvalRunConfig] = []
    monkeypatch.setattr(evaluate_module, "run_evaluation", lambda config, as_json: asked.append(config) or 0)
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(sys, "argv", ["examples/run_eval.py"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path("examples/run_eval.py", run_name="__main__")
    assert asked[0].data.dataset_name == "AIME2024"

"""``strop eval RUN_OR_CHECKPOINT``: what a run validates on, for a checkpoint of any layout."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.checkpointing.saved_model import SavedModel
from strop.config import RolloutRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.runs.jobs.evaluation_identity import identify_entries
from strop.runs.jobs.evaluation_job import make_validation_job
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
    assert changed_settings(validation, found) == {"step"} and found["settings"]["step"] == 4
    assert validation["settings"]["model files"] == [], "they change from step to step"
    other = json.loads(Path(evaluate(capsys, str(logs), "generation.temperature=0.5")["stored_in"]).read_text())["identity"]
    assert changed_settings(validation, other) == {"step", "temperature"} and other["settings"]["temperature"] == 0.5


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

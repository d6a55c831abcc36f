"""``strop compare A B``: stored evaluations, runs, checkpoints and models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import strop
from strop import cli
from support.reported_runs import HOSTILE
from support.saved_runs import save_run


def write_evaluation(path: Path, *, gain: float = 0.0, tasks: int = 40, samples: int = 4, seed: int = 0, **changes: Any) -> Path:
    """Write an evaluation of made-up tasks, whose difficulties are the same in every file."""
    difficulties, drawn = random.Random("tasks"), random.Random(seed)
    stored = []
    for index in range(tasks):
        chance = difficulties.random() * (1 - gain) + gain
        rows = []
        for sample in range(samples):
            right = float(drawn.random() < chance)
            answer = str(index if right else -1)
            messages = [{"role": "user", "content": f"Solve: what is {index} + 0?"}, {"role": "assistant", "content": answer}]
            rows.append(
                {"sample": sample, "messages": messages, "turns": [{"path": 0}], "completion": answer, "accuracy": right,
                 "answer": answer, "reward": right, "tokens": 3 + sample, "ending": "stop", "error": None}
            )  # fmt: skip
        stored.append({"task": f"sums:{index}", "environment": "math", "answer": str(index), "samples": rows} | changes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step": 1, "metrics": {}, "tasks": stored}))
    return path


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code = cli.main(["compare", "--json", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code = cli.main(["compare", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 2, captured
    return captured.err


def test_the_better_of_two_evaluations_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_evaluation(tmp_path / "a.json"), write_evaluation(tmp_path / "b.json", gain=0.6, seed=1)
    assert cli.main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "\nB is better: +" in out and "95 % interval +" in out and "p < 0.001." in out
    assert "40 tasks, samples: 4 of each" in out and "\npass@4, % " in out and "\ntruncated" not in out and "\navg_length " in out
    assert "B better, the largest differences:" in out and "'Solve: what is " in out and "expected '" in out
    assert strop.compare(a, b).better == "b" and strop.compare(str(b), a, margin=0.01).better == "a"
    assert cli.main(["compare", str(b), str(a)]) == 0
    assert "\nA is better: -" in capsys.readouterr().out


def test_an_evaluation_and_itself_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_evaluation(tmp_path / "a.json")
    found = compare(capsys, a, a)
    assert found["better"] is None and found["total"]["difference"] == 0 and found["total"]["p_value"] == 1
    assert found["verdict"].startswith(
        "no difference can be seen, the two are equal in all 40 tasks: +0.0 points, 95 % interval -"
    )
    low, high = found["total"]["interval"]
    assert low == -high < -0.01  # as many tasks do not tell that no task differs
    assert compare(capsys, a, a, "--margin", "0.2")["verdict"].startswith("the two are equivalent within 20.0 points")


def test_other_metrics_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_evaluation(tmp_path / "a.json"), write_evaluation(tmp_path / "b.json", gain=0.6, seed=1)
    assert compare(capsys, a, b, "--metric", "pass@2")["verdict"].startswith("B is better in pass@2: +")
    assert compare(capsys, a, b, "--metric", "avg_length")["total"]["a"] == 4.5
    assert "choose accuracy, avg@N" in refuse(capsys, a, b, "--metric", "acuracy")
    assert "pass@8 needs 8 samples" in refuse(capsys, a, b, "--metric", "pass@8")
    assert "0.02 is 2 points" in refuse(capsys, a, b, "--margin", "2")
    assert "level is 95" in refuse(capsys, a, b, "--level", "95")


def test_other_tasks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_evaluation(tmp_path / "a.json")
    other = json.loads(a.read_text())
    for index, task in enumerate(other["tasks"]):
        for sample in task["samples"]:
            sample["messages"][0]["content"] = (
                f"Solve: what is {index} + 1 - 1?" if index == 7 else f"Solve: what is {index} + 0?"
            )
    (tmp_path / "question.json").write_text(json.dumps(other))
    assert "the question that 'sums:7' asks" in refuse(capsys, a, tmp_path / "question.json")
    answered = write_evaluation(tmp_path / "answer.json", answer="99")
    assert "40 of 40 tasks have the same name and are not the same: the answer" in refuse(capsys, a, answered)
    named = write_evaluation(tmp_path / "name.json", task="other", tasks=1)
    assert "no task is in both evaluations" in refuse(capsys, a, named)
    (tmp_path / "no.json").write_text("[]")
    assert "is no evaluation with samples" in refuse(capsys, a, tmp_path / "no.json")
    assert "name two: strop compare A B" in _usage(capsys, str(a))


def _usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_other_instructions_around_the_same_questions_are_compared_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_evaluation(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(a.read_text().replace("Solve: ", "Think first. ").replace("+ 0?", "+ 0? Answer:"))
    assert "the prompts around the questions differ" in compare(capsys, a, tmp_path / "b.json")["notes"][0]


def sampled(temperature: float, verifier: str = "boxed") -> dict[str, Any]:
    """Return how an evaluation was sampled and scored."""
    return {"settings": {"engine": "torch"}, "sets": {"sums": {"temperature": temperature, "env.math": {"verifier": verifier}}}}


def write_identity(path: Path, identity: dict[str, Any]) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), "identity": identity}))
    return path


def test_evaluations_that_were_sampled_or_scored_differently_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_identity(write_evaluation(tmp_path / "a.json"), sampled(1.0))
    b = write_identity(write_evaluation(tmp_path / "b.json", seed=1), sampled(0.6, "dapo"))
    found = compare(capsys, a, b)
    assert "sampled and scored differently" in found["notes"][0] and "temperature: 1.0 in A, 0.6 in B" in found["notes"][0]
    assert found["differences"][1] == {"key": "env.math.verifier", "a": "boxed", "b": "dapo"}
    alike = write_identity(write_evaluation(tmp_path / "c.json", seed=1), sampled(1.0))
    assert not compare(capsys, a, alike)["notes"] and not compare(capsys, a, alike)["differences"]
    old = write_evaluation(tmp_path / "d.json")
    assert compare(capsys, a, old)["notes"][0].startswith("how B was sampled and scored is not stored")
    assert cli.main(["compare", str(a), str(b)]) == 0
    assert "sampled and scored differently" in capsys.readouterr().out


def test_several_sets_are_compared_each_and_as_their_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, gains in (("a", (0.0, 0.0)), ("b", (0.7, 0.0))):
        tasks = []
        for index, (set_name, gain) in enumerate(zip(("easy", "hard"), gains, strict=True)):
            path = write_evaluation(tmp_path / "part.json", gain=gain, seed=hash(name) % 7 + index, tasks=30, set=set_name)
            tasks += json.loads(path.read_text())["tasks"]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"step": 1, "metrics": {}, "tasks": tasks}))
    found = compare(capsys, *paths)
    easy, hard = found["sets"]["easy"], found["sets"]["hard"]
    assert found["total"]["difference"] == pytest.approx((easy["difference"] + hard["difference"]) / 2)
    assert easy["higher_one"] == "b" and hard["higher_one"] is None and found["total"]["tasks"] == 60
    assert easy["adjusted_p_value"] == pytest.approx(2 * easy["p_value"])
    cli.main(["compare", *map(str, paths)])
    assert "\nmean of sets " in capsys.readouterr().out


@pytest.fixture
def runs(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two runs with two checkpoints each, the log folder of one and the folder of checkpoints of the other."""
    monkeypatch.chdir(tmp_path)
    a = save_run(tmp_path / "a", tiny_model_folder).relative_to(tmp_path)
    save_run(tmp_path / "b", tiny_model_folder)
    return str(a), "b/results/mine"


def test_runs_are_evaluated_on_what_the_first_validates_on(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(capsys, *runs)
    assert found["total"]["tasks"] == 6 and "step 4: " in found["sources"]["a"] and "/evaluations/" in found["sources"]["b"]
    assert found["total"]["difference"] == 0  # the same weights, tasks and seeds
    stored = sorted(Path().glob("**/evaluations/*/step_000004.json"))
    assert len(stored) == 2
    again = compare(capsys, *runs)
    assert again["sources"] == found["sources"] and sorted(Path().glob("**/evaluations/*/step_000004.json")) == stored


def test_runs_whose_validations_were_sampled_differently_are_evaluated_alike(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [Path(folder) / "validation/step_000004.json" for folder in (runs[0], "b/logs/mine")]
    for file, temperature in zip(files, (1.0, 0.6), strict=True):
        write_identity(write_evaluation(file), sampled(temperature))
    assert "to be evaluated" in _dry_run(capsys, *runs)
    write_identity(files[1], sampled(1.0))
    assert "to be evaluated" not in _dry_run(capsys, *runs)


def _dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["compare", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_two_models_need_to_be_told_what_to_be_evaluated_on(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "data.dataset_name=gsm8k" in refuse(capsys, tiny_model_folder, tiny_model_folder)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"problem": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(5))
    )
    found = compare(
        capsys, tiny_model_folder, tiny_model_folder, f"data.dataset_name={tmp_path}/rows.jsonl", "generation.max_new_tokens=4",
        "generation.device=cpu", "env.math.verifier=exact", "generation.vllm_cfg.max_model_len=32"
    )  # fmt: skip
    assert found["total"]["tasks"] == 5 and found["better"] is None
    assert "two evaluations are made" in refuse(capsys, tiny_model_folder, tiny_model_folder, "eval.save_path=here")


def test_a_dry_run_says_what_would_be_compared(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *runs, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"A           {runs[0]}, to be evaluated",
        f"B           {runs[1]}, to be evaluated",
    ]
    write_evaluation(Path(runs[0]) / "validation/step_000004.json")
    write_evaluation(Path("b/logs/mine/validation/step_000004.json"))
    assert cli.main(["compare", *runs, "--dry-run"]) == 0
    assert "as stored in a/logs/mine/validation/step_000004.json" in capsys.readouterr().out


def test_validations_of_steps_without_a_checkpoint_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("a", "b"):
        for step in (10, 20):
            write_evaluation(tmp_path / run / f"validation/step_0000{step}.json", seed=step, gain=0.5 * (run == "b"))
    found = compare(capsys, tmp_path / "a", tmp_path / "b", "--step", "10")
    assert "step_000010.json" in found["sources"]["a"] and found["total"]["tasks"] == 40
    assert "there are: 10, 20" in refuse(capsys, tmp_path / "a", tmp_path / "b", "--step", "15")


def test_an_unfinished_evaluation_is_no_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    assert "did not finish" in refuse(capsys, tmp_path, write_evaluation(tmp_path / "other/a.json"))


def test_what_a_model_wrote_is_printed_with_its_control_characters_as_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_evaluation(tmp_path / "a.json", answer=HOSTILE)
    b = write_evaluation(tmp_path / "b.json", gain=0.6, seed=1, answer=HOSTILE)
    assert cli.main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "B is better: +" in said and "alert(1)" in said and not set("\x1b\x07\u202e\x9b\ud800") & set(said)
    refused = _usage(capsys, str(a), str(b), "--html", "page.html")
    assert "this option is gone: the printed comparison, or --json, says all that the page said" in refused

"""``strop rollouts`` and ``strop plot``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop import cli
from strop.monitoring.rollout_store.rollout_flags import RolloutFlag
from strop.monitoring.rollout_store.rollout_record import make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.types import Ending, Group, Message, Rollout, Task, Turn, observation_turn

HOSTILE = (
    '\x1b]0;owned\x07\x1b[2J\u202egnp.exe\u2066\x9b31m</script><script>alert(1)</script><img src="http://x/y" onerror="z">\ud800'
)
TOOL = "the tool's answer"


def a_rollout(task: str, sample: int, reward: float, *, text: str = "I call the tool", tool: str = TOOL) -> Rollout:
    def said(text: str) -> tuple[Turn, Message]:
        versions = torch.full((3,), 6, dtype=torch.int32)
        turn = Turn(author="policy", tokens=torch.tensor([7, 8, 9]), text=text, logprobs=torch.zeros(3) - 0.5, versions=versions)
        return turn, Message("assistant", text)

    messages = (Message("system", "Be brief."), Message("user", f"question of {task}"))
    rollout = Rollout(task=Task(id=task, answer="4"), sample=sample, seed=0, messages=messages, prompt=torch.tensor([1, 2]))
    rollout = rollout.with_turn(*said(text)).with_turn(observation_turn([3, 4], tool), Message("tool", tool))
    rollout = rollout.with_turn(*said("so it is 4"))
    ending = Ending.STOP if sample % 2 == 0 else Ending.LENGTH
    return replace(rollout, ending=ending, reward=reward, rewards={"correct": reward}, metrics={"calls": 1.0})


def write_steps(folder: Path, steps: Sequence[int] = (1, 2), **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    store = RolloutStore(folder, "jsonl")
    for step in steps:
        groups = [
            Group(
                index=index, environment=("calculator", "search")[index], version=step,
                rollouts=tuple(a_rollout(f"task-{index}", sample, index + sample / 10, **texts) for sample in range(4)),
            )
            for index in range(2)
        ]  # fmt: skip
        learner = {(group, sample): torch.full((6,), -0.25) for group in range(2) for sample in range(4)}
        store.write(step, make_records(step, groups, advantages={(0, 0): 0.5}, learner_logprobs=learner))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_steps(tmp_path / "logs" / "mine")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["rollouts", *arguments]) == 0
    return capsys.readouterr().out


def titles(out: str) -> list[str]:
    return re.findall(r"^(step \d+, task \S+, sample \d+), \w+ ", out, flags=re.M)


def test_the_newest_step_is_shown_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(run))
    assert out.startswith("step 2: 8 rollouts of 2 tasks; reward 0.65 (0 to 1.3); ended by stop 4, length 4\n")
    assert titles(out) == [f"step 2, task task-0, sample {sample}" for sample in range(4)]
    for line in (
        "   system : Be brief.", "     user : question of task-0", "assistant | I call the tool", f"     tool : {TOOL}",
        "assistant | so it is 4", "rewards: correct 0", "metrics: calls 1", "advantage: +0.5", "answer: 4",
        "ended by: length: a turn reached the maximum number of new tokens",
    ):  # fmt: skip
        assert line in out
    assert "(3 tokens, weights of step 6)" in out and "shown: 4 of 8 rollouts" in out


def test_the_best_and_the_worst_are_chosen_by_reward(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(run), "--best", "2", "--worst", "1", "--step", "1")
    assert titles(out) == ["step 1, task task-1, sample 3", "step 1, task task-1, sample 2", "step 1, task task-0, sample 0"]


def test_rollouts_are_chosen_by_task_environment_and_ending(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(run), "--environment", "search", "--ending", "length", "--limit", "9")
    assert titles(out) == ["step 2, task task-1, sample 1", "step 2, task task-1, sample 3"]


def test_flagged_rollouts_are_chosen_and_say_by_what(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollouts", str(run), "--flagged"]) == 2
    assert "the monitor of reward hacking has flagged no rollout" in capsys.readouterr().err
    store = RolloutStore(run, "jsonl")
    store.flag([RolloutFlag(1, "task-1", 2, "length")])
    store.flag(
        [RolloutFlag(1, "task-1", 2, "length"), RolloutFlag(1, "task-1", 2, "judges"), RolloutFlag(1, "task-0", 3, "length")]
    )
    out = shown(capsys, str(run), "--flagged")
    assert titles(out) == ["step 1, task task-0, sample 3", "step 1, task task-1, sample 2"]
    assert "flagged: length, judges (perhaps the reward is hacked)" in out
    store.resume(0)
    assert not list((run / "rollouts").glob("*flags*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "9"], "no rollouts of step 9; stored are steps 1, 2"),
        (["--task", "tsk-1"], "no rollout of steps 1 to 2 is of the task 'tsk-1'; did you mean 'task-1'?"),
        (["--ending", "stopped"], "no rollout of step 2 ended by 'stopped'; did you mean 'stop'?"),
        (["--environment", "serch"], "did you mean 'search'?"),
        (["--environment", "search", "--task", "task-0"], "meets all conditions"),
        (["--validation"], "no validation is stored in"),
    ],
)
def test_what_is_not_there_is_said_with_the_nearest_names(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(["rollouts", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_rollouts_says_why_there_may_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollouts", str(tmp_path)]) == 2
    assert "the run has not finished a step, trains on recorded data, or has logger.rollouts=none" in capsys.readouterr().err
    assert cli.main(["rollouts", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_damaged_step_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [damaged] = run.rglob("step_000002.*")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert cli.main(["rollouts", str(run), "--step", "2"]) == 2
    assert f"{damaged.name} cannot be read" in capsys.readouterr().err


def test_a_step_without_rollouts_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RolloutStore(run, "jsonl").write(3, [])
    assert cli.main(["rollouts", str(run)]) == 2
    assert "error: no rollout of step 3 is stored: the step has none" in capsys.readouterr().err


def test_a_run_is_named_by_its_configuration_its_checkpoints_or_one_of_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "results" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(f"logger:\n  log_dir: {run}\n")
    for name in (checkpoint, checkpoint.parent, checkpoint / "config.yaml"):
        assert titles(shown(capsys, str(name), "--limit", "1")) == ["step 2, task task-0, sample 0"]


def test_what_a_model_wrote_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_steps(tmp_path, text=HOSTILE, tool=HOSTILE)
    out = shown(capsys, str(run), "--full")
    assert not set("\x1b\x07\u202e\u2066\x9b\ud800") & set(out)
    assert r"\x1b]0;owned\x07\x1b[2J\u202egnp.exe\u2066\x9b31m</script>" in out.replace("\n", "")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--best", "x", "x is not a number of rollouts"),
        ("--html", "page.html", "this option is gone: `strop view RUN` shows rollouts, their tokens and their images"),
    ],
)
def test_an_option_that_cannot_be_taken_is_refused(
    run: Path, option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rollouts", str(run), option, value])
    assert said in capsys.readouterr().err


def test_json_lines_have_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in shown(capsys, str(run), "--json", "--best", "2").splitlines()]
    assert [row["reward"] for row in rows] == [1.3, 1.2] and rows[0]["turns"][1]["text"] == TOOL
    assert rows[0]["sampler_logprobs"][:4] == [-0.5, -0.5, -0.5, 0.0]


def test_a_pipe_that_closes_ends_quietly_and_a_narrow_encoding_does_not_matter(tmp_path: Path) -> None:
    run = write_steps(tmp_path, text="素" * 1000)
    command = [sys.executable, "-m", "strop", "rollouts", str(run), "--limit", "8", "--full"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"step 2: 8 rollouts")
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_samples_of_validations_are_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "validation").mkdir()
    turns = [{"role": "assistant", "text": "5", "start": 0, "end": 2, "sampled": True, "versions": [3]}]
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    sample = {
        "messages": messages, "turns": turns, "completion": "5", "accuracy": 1.0, "answer": "5", "reward": 2.0,
        "rewards": {"right": 2.0}, "metrics": {"calls": 1.0}, "tokens": 2, "ending": "stop", "error": None,
    }  # fmt: skip
    older = {name: value for name, value in sample.items() if name not in ("turns", "metrics")}
    task = {"task": "sum", "environment": "arithmetic", "answer": "5", "samples": [sample, older]}
    for step in (2, 4):
        text = json.dumps({"step": step, "metrics": {}, "tasks": [task]})
        (tmp_path / "validation" / f"step_00000{step}.json").write_text(text)
    out = shown(capsys, str(tmp_path), "--validation")
    assert titles(out) == ["step 4, task sum, sample 0", "step 4, task sum, sample 1"]
    assert "metrics: accuracy 1, calls 1" in out and out.count("     user : 2+3\nassistant | 5\n") == 2
    assert len(titles(shown(capsys, str(tmp_path), "--validation", "--task", "sum"))) == 2


def write_run(folder: Path, seed: int, lr: float = 1e-5) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"grpo: {{seed: {seed}}}\npolicy: {{optimizer: {{kwargs: {{lr: {lr}}}}}}}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/reward": 0.6}\n')
    return folder


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The legends of the pictures that were drawn."""
    seen: list[list[str]] = []
    from matplotlib.figure import Figure

    def keep(figure: Figure, path: Path, dpi: int) -> None:
        seen.append([text.get_text() for text in figure.legends[0].texts])

    monkeypatch.setattr(Figure, "savefig", keep)
    monkeypatch.chdir(tmp_path)
    return seen


def test_runs_of_several_seeds_are_lines_named_by_what_differs(
    labels: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(Path(f"logs/{seed}_{lr}"), seed, lr)) for seed in (1, 2) for lr in (1e-5, 3e-5)]
    assert cli.main(["plot", *runs]) == 0
    assert capsys.readouterr().out == "comparison.png\n" and labels == [["lr=1e-05 (2 seeds)", "lr=3e-05 (2 seeds)"]]
    assert cli.main(["plot", *runs[:2], "--no-group-by-seed", "--output", "x.png", "--metric", "train/reward"]) == 0
    assert capsys.readouterr().out == "x.png\n" and labels[1] == ["lr=1e-05", "lr=3e-05"]


def test_one_run_with_chosen_metrics_goes_into_its_folder(labels: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(Path("logs/a"), 1)
    assert cli.main(["plot", str(run), "--metric", "train/reward"]) == 0
    assert capsys.readouterr().out == "logs/a/curves.png\n" and labels == [["a"]]


def test_a_run_that_is_not_there_is_named_with_near_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "seed_1", 1)
    assert cli.main(["plot", str(run), str(tmp_path / "sed_1")]) == 2
    assert "did you mean 'seed_1'?" in capsys.readouterr().err
    assert cli.main(["plot", str(run), "--metric", "train/rewrd"]) == 2
    assert "error: no run has values of 'train/rewrd'; did you mean 'train/reward'?" in capsys.readouterr().err

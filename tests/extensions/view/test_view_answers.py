"""What the view answers: runs, metrics, rollouts, groups, tasks, validations, stars, and files that are damaged or gone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.endings import Ending
from strop.extensions.view.config_defaults import find_changed
from strop.extensions.view.saved_view import PAGE
from strop.extensions.view.view_routes import ViewOptions, ViewServer
from strop.monitoring.rollout_store.rollout_flags import RolloutFlag
from strop.monitoring.rollout_store.rollout_record import TurnRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.bad_runs import write_bad_run
from support.each import each
from support.stored_steps import GROUPS, SAMPLES, make_stored, write_steps, write_stored_run
from support.view_client import asking
from support.viewed_runs import write_timeline

CONFIG = {"policy": {"precision": "float32"}, "grpo": {"seed": 7, "max_num_steps": 5}}


class Reader:
    """Asks a server, and checks the status of each answer."""

    def __init__(self, folder: Path) -> None:
        self.server = ViewServer([folder], ViewOptions(token=None), lambda text: CONFIG)
        self._serving = ExitStack()
        self.client = self._serving.enter_context(asking(self.server))

    def close(self) -> None:
        self._serving.close()

    def get(self, path: str, status: int = 200, **params: Any) -> Any:
        answer = self.client.get(f"/api/{path}", params=params or None)
        assert answer.status_code == status, answer.text
        return answer.json()

    def put(self, path: str, value: Any, status: int = 200) -> Any:
        answer = self.client.put(f"/api/{path}", json=value, headers={"Origin": str(self.client.base_url).rstrip("/")})
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_stored_run(tmp_path / "logs" / "a")


@pytest.fixture
def reader(folder: Path) -> Iterator[Reader]:
    found = Reader(folder.parent)
    yield found
    found.close()


def keys(answer: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(row["step"], row["group"], row["sample"]) for row in answer["rows"]]


def test_the_list_of_runs_finds_those_that_are_added(reader: Reader, folder: Path) -> None:
    (run,) = reader.get("runs")
    assert run["id"] == "a" and run["folder"] == str(folder) and run["kind"] == "grpo" and run["seed"] == 7
    assert (run["step"], run["max_steps"], run["steps_with_rollouts"], run["validations"]) == (3, 5, [1, 3, 3], [2])
    write_stored_run(folder.parent / "sweep" / "a", 1)
    reader.server.catalogue._scanned = -10.0
    assert len({run["id"] for run in reader.get("runs")}) == 2


def test_metrics_are_aligned_and_what_is_no_number_is_null(reader: Reader) -> None:
    assert reader.get("runs/a/metrics") == {
        "names": ["timing/train/total_step_time", "train/loss", "validation/accuracy"],
        "last_step": 3,
    }
    answer = reader.get("runs/a/metrics", names="train/loss,validation/accuracy,none")
    assert answer["steps"] == [1, 2, 3] and answer["seconds"] == [2.0, 2.0, 4.0]
    assert answer["series"] == {"train/loss": [0.1, None, 0.3], "validation/accuracy": [None, 1.0, None]}
    assert reader.get("runs/a/metrics", names="train/loss", since=2)["steps"] == [3]


def test_a_long_series_is_put_into_buckets_that_keep_its_range(reader: Reader, folder: Path) -> None:
    write_steps(folder, range(1, 1001))
    answer = reader.get("runs/a/metrics", names="train/loss", points=10)
    assert answer["steps"] == list(range(100, 1001, 100))
    assert (answer["low"]["train/loss"][0], answer["high"]["train/loss"][0]) == (0.1, 10.0)
    assert answer["series"]["train/loss"][-1] == pytest.approx(95.05)


def test_metrics_are_read_on_while_a_run_writes_them_and_again_after_a_resume(reader: Reader, folder: Path) -> None:
    reader.get("runs/a/metrics")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/loss": 4.0}\n{"step": 5, "tra')
    assert reader.get("runs/a/metrics", names="train/loss")["series"]["train/loss"][2:] == [0.3, 4.0]
    (folder / "new").write_text('{"step": 1, "train/loss": 8.0}\n')
    os.replace(folder / "new", folder / "metrics.jsonl")
    assert reader.get("runs/a/metrics", names="train/loss")["series"] == {"train/loss": [8.0]}


def test_the_time_line_of_samples_is_read_by_step(reader: Reader, folder: Path) -> None:
    assert reader.get("runs/a/timeline") == {"first": None, "last": None, "steps": []}
    write_timeline(folder, range(1, 12))
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('{"step":12,"gr')
    assert [line["step"] for line in reader.get("runs/a/timeline")["steps"]] == [11]
    found = reader.get("runs/a/timeline", step=7, count=100)
    assert (found["first"], found["last"], [line["step"] for line in found["steps"]]) == (1, 11, [1, 2, 3, 4, 5, 6, 7])
    assert found["steps"][0]["groups"][2]["samples"]["3"][1] == ["environment 1", 400, 1400]
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('"}\n{"step":13,"x":1}\n')
    assert reader.get("runs/a/timeline") == {"first": 1, "last": 13, "steps": []}
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('{"step":14,x}\n')
    assert "timeline.jsonl cannot be read" in reader.get("runs/a/timeline", 422)["error"]


def test_rollouts_are_listed_newest_first_with_their_numbers(reader: Reader) -> None:
    answer = reader.get("runs/a/rollouts")
    assert answer["total"] == 3 * GROUPS * SAMPLES and keys(answer)[:4] == [(3, 0, 0), (3, 0, 1), (3, 0, 2), (3, 1, 0)]
    row = answer["rows"][2]
    assert row["reward"] == 0.2 and row["rewards"] == {"correct": 0.2} and row["tokens"] == 4 and row["advantage"] == 1.0
    assert (
        row["preview"] == "step 3 says 0.2 [tool calculator] tool [assistant] done"
        and row["ending"] == "length"
        and row["kept"]
        and not row["flags"]
    )
    assert answer["indexed"] == {"steps": 3, "of": 3, "complete": True}


@each("asked, expected", [
    ({"step": 2, "limit": 2, "from": 1}, [(2, 0, 1), (2, 0, 2)]),
    ({"steps": "2-", "sort": "reward", "limit": 2}, [(2, 0, 0), (2, 1, 0)]),
    ({"sort": "-reward", "limit": 2}, [(1, 0, 2), (1, 1, 2)]),
    ({"sort": "-tokens", "steps": "-1", "limit": 1}, [(1, 0, 2)]),
    ({"task": "sum:1/a", "reward_min": 0.1, "reward_max": 0.1, "sort": "step"}, [(1, 1, 1), (2, 1, 1), (3, 1, 1)]),
    ({"ending": "length", "step": 3}, [(3, 0, 2), (3, 1, 2)]),
    ({"env": "other"}, []), ({"kept": "0"}, []), ({"tokens_min": 5}, []), ({"task": "none"}, []), ({"step": 99}, []),
    ({"text": "SAYS 1.2", "sort": "step"}, [(1, 1, 2), (2, 1, 2), (3, 1, 2)]),
    ({"text": "step 2 says", "reward_min": 0.2}, [(2, 0, 2), (2, 1, 2)]),
], ids=lambda case: str(case[0]))  # fmt: skip
def test_rollouts_are_filtered_and_sorted(reader: Reader, asked: dict[str, Any], expected: list[tuple[int, int, int]]) -> None:
    assert keys(reader.get("runs/a/rollouts", **asked)) == expected


@each(
    "asked",
    [{"sort": "x"}, {"steps": "a"}, {"step": "-1"}, {"kept": "x"}, {"reward_min": "x"}, {"limit": "x"}, {"steps": "-"}],
    ids=str,
)
def test_a_mistake_in_a_request_is_a_sentence(reader: Reader, asked: dict[str, str]) -> None:
    assert reader.get("runs/a/rollouts", 400, **asked)["error"].startswith(f"{next(iter(asked))}: found")


def test_one_rollout_has_everything_that_is_stored_of_it(reader: Reader) -> None:
    found = reader.get("runs/a/rollouts/2/1/2")
    assert [turn["text"] for turn in found["turns"]] == ["step 2 says 1.2 ", "tool", " done"]
    assert found["sampled"] == [True, True, False, True, True] and found["sampler_logprobs"] == [-0.5, -0.5, None, -0.5, -0.5]
    assert found["ratio"] == [1.28403, 1.28403, None, 1.28403, 1.28403] and found["advantages"] == [1.0, 1.0, None, 1.0, 1.0]
    assert found["mask"] == [1, 1, 0, 1, 1] and found["mask_reason"] == [None, None, "written by the environment", None, None]
    assert found["pieces"] is None and found["entropy"] is None  # no tokenizer, and a column that is not stored
    assert found["prompt_messages"] == [{"role": "user", "content": "1 + 1?", "images": []}] and found["answer"] == "2"
    assert "no sample 9" in reader.get("runs/a/rollouts/2/1/9", 404)["error"]
    assert "stored are 3 steps, 1 to 3" in reader.get("runs/a/rollouts/99/1/9", 404)["error"]


def test_a_group_stands_side_by_side_the_best_first(reader: Reader) -> None:
    found = reader.get("runs/a/groups/1/0")
    assert [row["reward"] for row in found["rollouts"]] == [0.2, 0.1, 0.0] and found["task"] == "sum:0/a"
    assert found["rollouts"][0]["text"] == "step 1 says 0.2 tool done"


def test_tasks_are_counted_sorted_found_by_what_they_ask_and_one_is_followed_over_the_steps(reader: Reader) -> None:
    row = {
        "task": "sum:1/a",
        "question": "1 + 1?",
        "rollouts": 9,
        "reward": pytest.approx(0.1),
        "change": pytest.approx(0),
        "steps": 3,
    }
    answer = reader.get("runs/a/tasks", text="SUM:1")
    assert (answer["total"], answer["rows"]) == (1, [{**row, "last_step": 3}]) and answer["searched"]["complete"]
    assert reader.get("runs/a/tasks", text="<USER>1 + 1")["total"] == GROUPS
    answer = reader.client.get("/api/runs/a/tasks/sum%3A1%2Fa").json()
    assert [each["step"] for each in answer] == [1, 2, 3] and len(answer[0]["rollouts"]) == SAMPLES
    assert [each["step"] for each in reader.client.get("/api/runs/a/tasks/sum%3A1%2Fa?limit=2").json()] == [1, 3]


def test_tasks_are_sorted_by_their_names_as_numbers_and_by_how_their_rewards_change(reader: Reader, folder: Path) -> None:
    store = RolloutStore(folder)
    for step in (1, 2, 3):  # the second task gets better, the tenth worse; the third has no reward
        rewards = {"t:2": 0.2 * step, "t:10": 0.5 - 0.1 * step, "t:3": float("nan")}
        records = [make_stored(step, group, 0, task_id=task, reward=each) for group, (task, each) in enumerate(rewards.items())]
        store.write(step, records)

    def names(order: str) -> list[str]:
        return [row["task"] for row in reader.get("runs/a/tasks", sort=order)["rows"]]

    assert names("") == ["t:2", "t:3", "t:10"] and names("-task") == ["t:10", "t:3", "t:2"]
    assert names("-change") == ["t:2", "t:10", "t:3"] and names("reward") == ["t:10", "t:2", "t:3"]
    rows = {row["task"]: row["change"] for row in reader.get("runs/a/tasks")["rows"]}
    assert rows == {"t:2": pytest.approx(0.4), "t:10": pytest.approx(-0.2), "t:3": None}


def test_rollouts_have_their_reference_and_rewards_by_name_to_filter_and_sort_by(reader: Reader, folder: Path) -> None:
    store = RolloutStore(folder)
    step = [make_stored(1, 0, sample, answer=f"{10 - sample}", rewards={"a": sample / 4, "b": 1.0}) for sample in range(4)]
    store.write(1, [*step, make_stored(1, 1, 0, answer="", rewards={"b": 0.5})])
    RolloutStore(folder, "jsonl").write(2, [make_stored(2, 0, 0, answer="4", rewards={"a": 0.9})])
    reader.server.catalogue.find("a").rollouts.update()
    answer = reader.get("runs/a/rollouts", steps="-2", sort="-rewards.a")
    assert answer["parts"] == ["a", "b", "correct"]
    assert [row["rewards"].get("a") for row in answer["rows"]] == [0.9, 0.75, 0.5, 0.25, 0.0, None]
    assert keys(reader.get("runs/a/rollouts", steps="-2", part="a", reward_min=0.5, reward_max=0.8, sort="step")) == [
        (1, 0, 2),
        (1, 0, 3),
    ]
    assert keys(reader.get("runs/a/rollouts", steps="-2", answer="9")) == [(1, 0, 1)]
    assert [row["answer"] for row in reader.get("runs/a/rollouts", steps="-2", sort="answer")["rows"]] == [
        "4",
        "7",
        "8",
        "9",
        "10",
        "",
    ]
    again = Reader(folder.parent)  # from the index that was written
    assert again.get("runs/a/rollouts", steps="-2", sort="-rewards.a")["rows"] == answer["rows"]
    again.close()


def test_the_most_frequent_answers_are_counted_by_step_with_how_often_they_are_right(reader: Reader, folder: Path) -> None:
    store = RolloutStore(folder)
    said = {1: ["The answer is 2.", "so\n3"], 2: ["\\boxed{2}"] * 2, 3: ["x"] * 2}
    for step, texts in said.items():
        store.write(
            step, [make_stored(step, group, 0, completion=text, answer=str(group + 2)) for group, text in enumerate(texts)]
        )
    answer = reader.get("runs/a/answers")
    assert (answer["steps"], answer["totals"], answer["distinct"]) == ([1, 2, 3], [2, 2, 2], 3)
    assert answer["rows"][0] == {"answer": "2", "counts": [1, 2, 0], "references": [1, 1, 1]}
    assert reader.get("runs/a/answers", validation=1)["rows"] == [{"answer": "4", "counts": [3], "references": [3]}]


def test_settings_that_differ_from_their_defaults_are_told_from_the_others() -> None:
    values = {"policy.model_name": "m", "policy.tokenizer.name": "m", "policy.precision": "float32", "policy.max_grad_norm": 1.0,
              "policy.optimizer.kwargs.lr": 0.1, "env.mine.type": "x.py:X", "env.mine.extra": None, "grpo.seed": 3}  # fmt: skip
    changed = find_changed(values, "grpo")
    assert set(changed) == {"policy.model_name", "policy.precision", "policy.optimizer.kwargs.lr", "env.mine.type", "grpo.seed"}
    assert changed["policy.precision"] == "bfloat16" and changed["env.mine.type"] is None
    assert set(find_changed({"a.b": 1}, "")) == {"a.b"}


def test_failures_are_counted_by_ending_with_the_worst_tasks(tmp_path: Path) -> None:
    """A file of an earlier version has no endings but those that it had."""
    folder = write_stored_run(tmp_path / "logs" / "a")
    stored = RolloutStore(folder, "parquet")
    failed = [
        replace(record, ending="sandbox" if record.task_id.startswith("sum:1") or not record.sample else "crash", error="lost")
        if record.task_id.startswith("sum:1") or record.sample < 2
        else record
        for record in stored.read(3)
    ]
    stored.write(3, failed)
    reader = Reader(folder.parent)
    try:
        sandbox, crash = reader.get("runs/a/failures")
    finally:
        reader.close()
    assert (sandbox["ending"], sandbox["who"], crash["ending"], crash["who"]) == ("sandbox", "infrastructure", "crash", "policy")
    assert sandbox["worst"][0] == {"task": "sum:1/a", "failed": 3, "rollouts": 9} and "started" not in sandbox["meaning"]
    assert sandbox["rollouts"] == 3 + GROUPS - 1 and crash["rollouts"] == GROUPS - 1
    assert sandbox["share"] == pytest.approx(sandbox["rollouts"] / (3 * GROUPS * SAMPLES))


def test_the_page_knows_every_ending() -> None:
    known = (PAGE / "lib" / "rollouts.js").read_text().partition("ENDINGS = {")[2].partition("}")[0]
    assert re.findall(r"^  (\w+): ", known, re.MULTILINE) == [ending.value for ending in Ending]


def test_validations_have_their_metrics_and_samples(reader: Reader) -> None:
    (validation,) = reader.get("runs/a/validation")
    assert (validation["step"], validation["metrics"]) == (2, {"validation/accuracy": 1.0})
    low, high = validation["intervals"]["validation/accuracy"]
    assert 0.3 < low < 0.5 and high == 1.0, "Wilson's, of three tasks"
    answer = reader.get("runs/a/validation/2", limit=2)
    assert answer["total"] == 3 and keys(answer) == [(2, 0, 0), (2, 1, 0)] and answer["rows"][0]["metrics"] == {"accuracy": 1.0}
    assert reader.get("runs/a/rollouts", validation=1, task="sum:2")["total"] == 1
    assert reader.get("runs/a/rollouts/2/1/0", validation=1)["turns"][0]["text"] == "4"
    assert "stored are 2" in reader.get("runs/a/validation/3", 404)["error"]


def test_stars_are_kept_changed_and_exported(reader: Reader, folder: Path) -> None:
    star = {"step": 2, "group": 1, "sample": 0, "starred": True, "note": "odd"}
    reader.put("runs/a/stars", star)
    reader.put("runs/a/stars", {**star, "validation": True})
    assert reader.get("runs/a/rollouts", step=2)["rows"][3]["starred"]
    assert reader.get("runs/a/rollouts/2/1/0")["starred"]
    reader.put("runs/a/stars", {**star, "step": 50})  # its rollouts may be removed
    lines = reader.client.get("/api/stars/export").text.splitlines()
    exported = [json.loads(line) for line in lines]
    assert [(row["run"], row["note"], row["step"]) for row in exported] == [("a", "odd", 2), ("a", "odd", 2), ("a", "odd", 50)]
    assert exported[0]["token_ids"] == [10, 11, 12] and "error" in exported[2]
    reader.put("runs/a/stars", {**star, "starred": False})
    assert len(reader.get("runs/a/stars")) == 2
    for wrong in ([], {}, {**star, "step": -1}, {**star, "step": "2"}, {**star, "note": 1}, {**star, "note": "x" * 10_001}):
        assert "star" in reader.put("runs/a/stars", wrong, 400)["error"]


def test_rollouts_that_a_detector_names_are_flagged(reader: Reader, folder: Path) -> None:
    RolloutStore(folder).flag([RolloutFlag(2, "sum:1/a", 0, "length")])
    assert [row["flags"] for row in reader.get("runs/a/rollouts", step=2)["rows"]] == [[], [], [], ["length"], [], []]
    assert reader.get("runs/a/rollouts/2/1/0")["flags"] == ["length"]


def test_a_step_that_is_written_again_or_added_is_read_again(reader: Reader, folder: Path) -> None:
    reader.get("runs/a/rollouts")
    store = RolloutStore(folder)
    store.write(3, [make_stored(3, 0, 1, completion="again", turns=())])
    store.write(4, [make_stored(4, 0, 0)])
    answer = reader.get("runs/a/rollouts", steps="3-")
    assert keys(answer) == [(4, 0, 0), (3, 0, 1)] and answer["rows"][1]["preview"] == "again"
    (folder / "rollouts" / "step_000004.parquet").unlink()
    assert reader.get("runs/a/rollouts")["total"] == 13


def test_an_index_is_kept_beside_the_rollouts_and_used_again(reader: Reader, folder: Path) -> None:
    reader.get("runs/a/rollouts")
    run = reader.server.catalogue.find("a")
    run.rollouts.update()
    assert [path.name for path in (folder / "rollouts" / "index").iterdir()] == ["steps_000000.arrow"]
    for step in (1, 2, 3):  # the same size and time, so only the index can know what was in them
        path = folder / "rollouts" / f"step_{step:06d}.parquet"
        found = path.stat()
        path.write_bytes(b"x" * found.st_size)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    other = Reader(folder.parent)
    answer = other.get("runs/a/rollouts", sort="-reward")
    other.close()
    assert answer["total"] == 18 and answer["rows"][0]["reward"] == 0.2 and answer["rows"][0]["preview"] == ""


@each("content", [b"", b"PAR1", b"x" * 100, None], ids=str)
def test_a_damaged_index_is_made_again(tmp_path: Path, content: bytes | None) -> None:
    name = "none" if content is None else str(len(content))
    folder = write_stored_run(tmp_path / name / "a")
    index = folder / "rollouts" / "index"
    index.mkdir()
    (index / "steps_000000.arrow").mkdir() if content is None else (index / "steps_000000.arrow").write_bytes(content)
    reader = Reader(folder.parent)
    assert reader.get("runs/a/rollouts")["total"] == 18
    reader.server.catalogue.find("a").rollouts.update()
    reader.close()


def test_damaged_and_half_written_files_are_named_and_the_others_shown(reader: Reader, folder: Path) -> None:
    (folder / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 half")
    (folder / "rollouts" / "step_000009.jsonl").write_text('{"step": 9, "gro')
    (folder / "status.json").write_text('{"state": "runn')
    (folder / "config.yaml").write_text("a: [")
    (folder / "validation" / "step_000004.json").write_text("{")
    answer = reader.get("runs/a/rollouts")
    assert answer["total"] == 12 and [why.split()[0] for why in answer["unreadable"]] == [
        "step_000002.parquet",
        "step_000009.jsonl",
    ]
    assert "cannot be read" in reader.get("runs/a/rollouts/2/0/0", 422)["error"]
    assert "status.json cannot be read" in reader.get("runs/a/status", 422)["error"]
    assert "cannot be read" in reader.get("runs/a/validation/4", 422)["error"]
    assert reader.get("runs")[0]["id"] == "a"


def test_a_run_that_is_removed_while_it_is_open_is_said_to_be_gone(reader: Reader, folder: Path) -> None:
    reader.get("runs/a/rollouts")
    shutil.rmtree(folder / "rollouts")
    assert reader.get("runs/a/rollouts")["total"] == 0
    shutil.rmtree(folder)
    assert "is gone" in reader.get("runs/a/rollouts", 410)["error"]
    assert "is gone" in reader.get("runs/a/metrics", 410)["error"]


def test_files_of_earlier_versions_are_shown(reader: Reader, folder: Path) -> None:
    import pyarrow.parquet as pq

    path = folder / "rollouts" / "step_000001.parquet"
    later = ("turns", "branches", "prompt_messages", "metrics", "answer", "output", "prompt_images")
    pq.write_table(pq.read_table(path).drop_columns([name for name in later if name in pq.read_schema(path).names]), path)
    found = reader.get("runs/a/rollouts/1/0/1")
    assert found["turns"][0]["text"] == "step 1 says 0.1 tool done" and found["prompt_messages"][0]["content"] == "<user>1 + 1?"
    store = RolloutStore(folder, "jsonl")
    store.write(2, [make_stored(2, 0, 0, reward=float("nan"), advantage=None)])
    row = reader.get("runs/a/rollouts", step=2)["rows"][0]
    assert (row["reward"], row["advantage"], row["preview"]) == (
        None,
        None,
        "step 2 says 0.0 [tool calculator] tool [assistant] done",
    )
    assert reader.get("runs/a/rollouts/2/0/0")["token_ids"] == [10, 11, 12]
    assert reader.get("runs/a/rollouts", text="says 0.0", step=2)["total"] == 1


def test_configurations_are_compared_by_key(reader: Reader, folder: Path) -> None:
    other = write_stored_run(folder.parent / "b", 1)
    history = {"from_step": 1, "time": "", "config": {**CONFIG, "grpo": {"seed": 8, "max_num_steps": 5}}}
    changed = {"from_step": 2, "time": "", "changed": {"policy.precision": ["float32", "bfloat16"], "loss_fn.clip": [None, 0.2]}}
    (other / "config_history.jsonl").write_text(json.dumps(history) + "\n" + json.dumps(changed) + "\n")
    assert reader.get("compare/config", a="a", b="b") == [
        {"key": "grpo.seed", "a": 7, "b": 8},
        {"key": "loss_fn.clip", "a": None, "b": 0.2},
        {"key": "policy.precision", "a": "float32", "b": "bfloat16"},
    ]
    assert "there is no run" in reader.get("compare/config", 404, a="a", b="none")["error"]


def test_replays_are_shown_and_what_is_half_written_left_out(reader: Reader, folder: Path) -> None:
    (folder / "replays").mkdir()
    (folder / "replays" / "one.json").write_text('{"step": 2, "loss": 0.5}')
    (folder / "replays" / "two.json").write_text('{"step": ')
    assert reader.get("runs/a/replays") == [{"file": "one.json", "step": 2, "loss": 0.5}]


def test_health_is_judged_from_the_metrics_also_of_steps_that_are_added_and_names_what_was_logged(tmp_path: Path) -> None:
    folder = write_bad_run(tmp_path / "logs" / "a", "all_truncated")
    path = folder / "metrics.jsonl"
    steps = path.read_text().splitlines(keepends=True)
    path.write_text("".join(steps[:13]))
    reader = Reader(folder.parent)
    assert reader.get("runs/a/health") == {"level": "ok", "findings": []}
    path.write_text("".join(steps))
    answer = reader.get("runs/a/health")
    (finding,) = answer["findings"]
    assert answer["level"] == "wrong" and finding["held"] == [[14, 30]] and "every rollout of 3 steps" in finding["message"]
    path.write_text("".join(steps[:20]) + json.dumps({"step": 26, "health/single_turn": 1.0, "monitor/length_alarm": 1.0}) + "\n")
    answer = reader.get("runs/a/health")  # it was resumed after step 20
    reader.close()
    assert answer["level"] == "look"
    assert [(each["name"], each["now"], each["held"]) for each in answer["findings"]] == [
        ("single_turn", True, [[26, 26]]), ("length", True, [[26, 26]]), ("all_truncated", False, [[14, 20]]),
    ]  # fmt: skip


def test_a_run_without_status_says_why_it_is_not_known(reader: Reader) -> None:
    answer = reader.get("runs/a/status")
    assert answer["verdict"] == "unknown" and "no status.json" in answer["why"] and answer["step"] == 3


def test_tokens_have_the_texts_of_the_runs_tokenizer_as_codes_where_they_control(reader: Reader, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"[UNK]": 0, "one": 10, "\x1b[31m": 11, "<b>": 12}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    config = {"policy": {"model_name": "none", "tokenizer": {"name": str(tmp_path)}}}
    reader.server.catalogue._parse_yaml = lambda text: config
    found = reader.get("runs/a/rollouts/2/1/0")
    assert [piece.strip() for piece in found["pieces"]] == ["one", "\\x1b[31m", "<b>"] and not found["pieces_pending"]


def test_reasoning_stands_apart_where_a_policy_reasoned_and_not_where_the_tags_are_spoken_of(
    reader: Reader, folder: Path
) -> None:
    text = "why\x1b[31m</think>\n4"
    turn = TurnRecord(role="assistant", text=text, start=0, end=2, sampled=True, versions=(1,))
    asked = (
        {"role": "user", "content": "Think between <think> and </think>."},
        {"role": "assistant", "content": "<think>a</think>b"},
    )
    record = make_stored(2, 0, 0, turns=(turn,), prompt="assistant\n<think>\n", prompt_messages=asked, completion=text)
    RolloutStore(folder).write(2, [record])
    found = reader.get("runs/a/rollouts/2/0/0")
    why, said = found["turns"][0]["parts"]
    assert (why["text"], why["is_reasoning"], why["is_closed"], why["start"]) == ("why\\x1b[31m", True, True, None)
    assert (said["text"], said["is_reasoning"]) == ("4", False)
    assert ["parts" in message for message in found["prompt_messages"]] == [False, True]
    (shown,) = reader.get("runs/a/groups/2/0")["rollouts"][0]["turns"]
    assert [part["is_reasoning"] for part in shown["parts"]] == [True, False]


def test_reasoning_in_a_field_of_its_own_stands_before_its_message_and_says_where_it_comes_from(
    reader: Reader, folder: Path
) -> None:
    asked = ({"role": "assistant", "content": "4", "reasoning": "2 + 2\x1b[31m"}, {"role": "user", "content": "Sure?"})
    turns = (
        TurnRecord(role="assistant", text="Yes", start=0, end=2, sampled=True, versions=(1,)),
        TurnRecord(role="assistant", text="No", start=2, end=3, sampled=False, versions=(), reasoning="Wait"),
    )
    for prompt, origin in (
        ("<think>2 + 2\x1b[31m</think>4", ", and in the prompt"),
        ("4", ", and not in the prompt: the policy did"),
    ):
        RolloutStore(folder).write(2, [make_stored(2, 0, 0, turns=turns, prompt=prompt, prompt_messages=asked)])
        found = reader.get("runs/a/rollouts/2/0/0")
        why, said = found["prompt_messages"][0]["parts"]
        assert (why["text"], why["is_reasoning"], said["text"], "origin" in said) == ("2 + 2\\x1b[31m", True, "4", False)
        assert why["origin"].startswith(f"given in its own field{origin}") and "parts" not in found["prompt_messages"][1]
        assert "parts" not in found["turns"][0]
        assert [part["text"] for part in found["turns"][1]["parts"]] == ["Wait", "No"]


def test_the_rollouts_of_a_group_have_their_turns(reader: Reader) -> None:
    first = reader.get("runs/a/groups/1/0")["rollouts"][0]
    assert [(turn["role"], turn["tool"], turn["sampled"]) for turn in first["turns"]] == [
        ("assistant", "", True),
        ("tool", "calculator", False),
        ("assistant", "", True),
    ]
    assert first["num_turns"] == 3
    assert reader.get("runs/a/groups/1/9", 404)["error"] == "step 1 has no group 9; it has groups 0 to 1"

"""A file of a run that cannot be read, or would fill the memory, hides no other run and no other file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Client

from strop.extensions.view.rollout_index import read_rows, read_values
from strop.extensions.view.view_routes import ViewOptions, ViewServer
from strop.extensions.view.viewed_run import ViewedRun
from strop.monitoring.rollout_store import stored_files
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_files import DamagedRollouts
from support.each import each
from support.stored_steps import inflate, write_stored_run
from support.view_client import asking

DEEP = "[" * 100_000


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    for name in ("good", "bad"):
        write_stored_run(tmp_path / name, 2)
    with asking(ViewServer([tmp_path], ViewOptions(token=None), json.loads)) as client:
        yield client


LINES = (
    DEEP, '{"step": 1e999}', '{"step": 99999999999999999999999}', '{"step": 3, "loss": 1' + "0" * 400 + "}", "[]", "null", '{"step": [1]}',
    '{"step": null}', "\x00\xff", '{"a": ' * 50_000, '{"step": 3, "loss": NaN}', "5", '"text"',
)  # fmt: skip


@each("name", ["metrics.jsonl", "stars.jsonl", "status.json", "config_history.jsonl", "config.yaml", "starts.jsonl"])
def test_a_line_that_is_none_hides_neither_the_run_nor_the_others(client: Client, tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad" / name
    whole = path.read_text() if path.exists() else ""
    for line in LINES:
        path.write_text(f"{whole}{line}\n" if name.endswith(".jsonl") else line)
        found = client.get("/api/runs").json()
        assert sorted(run["id"] for run in found) == ["bad", "good"], (name, line[:40])
        for part in ("metrics", "rollouts", "stars"):
            assert client.get(f"/api/runs/bad/{part}").status_code == 200, (part, line[:40])
        assert client.get("/api/runs/good/rollouts").json()["total"] > 0
    path.write_text(whole)


def test_a_run_that_cannot_be_described_is_listed_with_the_reason(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = ViewedRun.describe

    def fail(run: ViewedRun) -> dict[str, Any]:
        if run.name == "bad":
            raise MemoryError("too large")
        return describe(run)

    monkeypatch.setattr(ViewedRun, "describe", fail)
    found = {run["id"]: run for run in client.get("/api/runs").json()}
    assert found["bad"]["state"] == "unreadable (MemoryError: too large)" and found["bad"].keys() == found["good"].keys()


@pytest.mark.parametrize(("column", "dictionary"), [("completion", True), ("task_id", True), ("prompt", False)])
def test_a_small_file_of_long_texts_is_not_read_into_memory(
    client: Client, tmp_path: Path, column: str, dictionary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "LARGE", 2**22)
    monkeypatch.setattr(stored_files, "LARGEST_TEXTS", 2**22)
    path = RolloutStore(tmp_path / "bad", "none").path(1)
    inflate(path, column, size=2**16, count=1024, dictionary=dictionary)
    assert path.stat().st_size < 100_000
    assert client.get("/api/runs/bad/rollouts?limit=100").status_code == 200
    assert client.get("/api/runs/bad/rollouts?text=aaab").status_code == 200
    assert client.get("/api/runs/good/rollouts").json()["total"] > 0
    rows = list(range(1024))
    with pytest.raises(DamagedRollouts, match=r"when they are read|more than"):
        read_values(path, rows, ("group", column)) if column != "task_id" else read_rows(path, 1, rows)

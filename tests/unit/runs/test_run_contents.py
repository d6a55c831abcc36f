"""What a name stands for: a run is continued by contents, not by names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeLearner, Recorder
from strop.checkpointing.base import RunState
from strop.config import TRAINING_RUNS, TrainingRunConfig, load_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import read_run_starts
from strop.rollouts.stream import StreamState
from strop.runs.lifecycle import make_checkpoints
from strop.runs.restore import restore_checkpoint
from strop.runs.run_contents import CONTENTS_FILE, find_contents, read_contents
from strop.runs.run_folders import ResumeError, plan_resume
from strop.storage import checksums
from strop.storage.checksums import digest_files
from support.models import build
from support.tokenizer import build_tokenizer


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that a run names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "answer": "3"}\n')
    (tmp_path / "held.csv").write_text("problem,answer\n2+2,4\n")
    (tmp_path / "prompt.txt").write_text("Solve: {question}")
    (tmp_path / "system.txt").write_text("Be short.")
    (tmp_path / "rewards.py").write_text("from neighbour import one\n\n\ndef right(task, rollout):\n    return one()\n")
    (tmp_path / "neighbour.py").write_text("def one():\n    return 1.0\n")
    return tmp_path


def write_model(folder: Path, seed: int = 0) -> None:
    build("llama", seed=seed).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def configure(folder: Path, *overrides: str) -> TrainingRunConfig:
    values = {
        "policy": {"model_name": "model"},
        "data": {
            "train": {
                "dataset_name": "rows.jsonl",
                "prompt_file": "prompt.txt",
                "system_prompt_file": "system.txt",
                "env_name": "mine",
            },
            "validation": {"dataset_name": "held.csv", "env_name": "mine"},
        },
        "env": {"mine": {"reward": "rewards.py:right"}},
        "checkpointing": {"checkpoint_dir": str(folder / "results")},
        "logger": {"log_dir": str(folder / "logs"), "console": "none"},
    }
    return load_config(None, list(overrides), root=TRAINING_RUNS["grpo"], values=values, check=False).config


def save(config: TrainingRunConfig) -> Path:
    state = RunState(step=4, stream=StreamState(next_index=8, unfinished=(), finished=()), logged={})
    return make_checkpoints(config, Path.exists).save(state, {"policy": FakeLearner()})


def restore(config: TrainingRunConfig) -> list[str]:
    recorder = Recorder()
    store = RolloutStore(Path(config.logger.log_dir))
    restore_checkpoint(config, make_checkpoints(config, Path.exists), {"policy": FakeLearner()}, recorder, store)
    return list(recorder.notes)


def edit_answer(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "answer": "4"}\n')


def append_row(folder: Path) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"problem": "2+2", "answer": "4"}\n')


def swap_rows(folder: Path) -> None:
    first, second = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text(f"{second}\n{first}\n")


def other_weights(folder: Path) -> None:
    """Change one value, and put the size and the time of modification back."""
    path = folder / "model" / "model.safetensors"
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_template(folder: Path) -> None:
    path = folder / "model" / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant\n", "assistant:\n"))


def other_tokens(folder: Path) -> None:
    path = folder / "model" / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["added_tokens"][0]["lstrip"] = True
    path.write_text(json.dumps(saved))


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        pytest.param(edit_answer, "data.train.dataset_name", "rows.jsonl has other rows", marks=pytest.mark.exhaustive),
        (append_row, "data.train.dataset_name", r"rows.jsonl has other rows \(68 bytes, now 102 bytes\)"),
        pytest.param(swap_rows, "data.train.dataset_name", "rows.jsonl has other rows", marks=pytest.mark.exhaustive),
        (other_weights, "policy.model_name", "model has other weights"),
        pytest.param(
            lambda folder: write_model(folder / "model", seed=3),
            "policy.model_name",
            "model has other weights",
            marks=pytest.mark.exhaustive,
        ),
        (other_template, "policy.tokenizer.chat_template", "model has another chat template"),
        (other_tokens, "policy.tokenizer.name", "model has other tokens or settings"),
        (
            lambda folder: (folder / "prompt.txt").write_text("Q: {question}"),
            "data.train.prompt_file",
            "prompt.txt has another text",
        ),
        pytest.param(
            lambda folder: (folder / "system.txt").write_text(""),
            "data.train.system_prompt_file",
            "system.txt has another text",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_other_contents_under_the_same_name_are_refused_until_a_key_accepts_them(
    change: Callable[[Path], object], key: str, said: str, project: Path
) -> None:
    config = configure(project)
    save(config)
    assert not plan_resume(config).contents
    change(project)
    with pytest.raises(ResumeError, match=f"{key}: {said}") as refused:
        plan_resume(config)
    assert f"checkpointing.accept_changed=[{key}]" in str(refused.value) and "run_name=NAME" in str(refused.value)
    notes = restore(configure(project, f"checkpointing.accept_changed=[{key}]"))
    assert any(note.startswith("changed since") and key in note for note in notes)


def test_code_and_what_is_no_identity_may_change_and_that_is_said(project: Path) -> None:
    config = configure(project)
    save(config)
    (project / "neighbour.py").write_text("def one():\n    return 2.0\n")
    (project / "held.csv").write_text("problem,answer\n2+2,5\n")
    notes = [note for note in restore(config) if note.startswith("changed since")]
    assert len(notes) == 2
    assert any("env.mine.reward: rewards.py:right has another code" in note for note in notes)
    assert any("data.validation.dataset_name: held.csv has other rows" in note for note in notes)


def test_the_fingerprints_are_in_the_checkpoint_the_log_folder_and_the_starts(project: Path) -> None:
    config = configure(project)
    restore(config)
    checkpoint = save(config)
    contents = find_contents(config)
    assert read_contents(checkpoint / CONTENTS_FILE) == read_contents(project / "logs" / CONTENTS_FILE) == contents
    kinds = {key: content.kind for key, content in contents.items()}
    assert kinds == {
        "data.train.dataset_name": "data",
        "data.validation.dataset_name": "data",
        "data.train.prompt_file": "file",
        "data.train.system_prompt_file": "file",
        "policy.model_name": "weights",
        "policy.tokenizer.name": "tokenizer",
        "policy.tokenizer.chat_template": "chat template",
        "env.mine.reward": "code",
    }
    assert read_run_starts(project / "logs")[0].data == {key: str(content) for key, content in contents.items()}


def test_checkpoints_of_earlier_versions_continue(project: Path) -> None:
    config = configure(project)
    (save(config) / CONTENTS_FILE).unlink()
    edit_answer(project)
    assert not plan_resume(config).contents


def test_rows_in_memory_are_compared_by_their_values(project: Path) -> None:
    rows: list[dict[str, Any]] = [{"problem": "1+1", "answer": "2", "image": b"\x00\xff"}, {"problem": "1+2", "answer": "3"}]

    def with_rows(rows: Any) -> TrainingRunConfig:
        config = configure(project)
        return replace(config, data=replace(config.data, train=(config.data.train[0].with_rows(rows),)))

    save(with_rows(rows))
    assert not plan_resume(with_rows([dict(row) for row in rows])).contents
    with pytest.raises(ResumeError, match=r"data\.train\.rows: the rows in memory has other rows"):
        plan_resume(with_rows([rows[0], {**rows[1], "answer": "4"}]))
    import datasets

    one, same = (datasets.Dataset.from_list([{"problem": "q", "answer": "1"}]) for _ in range(2))
    assert find_contents(with_rows(one))["data.train.rows"] == find_contents(with_rows(same))["data.train.rows"]


def test_a_function_of_python_is_known_by_its_file(project: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("mine_in_memory", project / "neighbour.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = configure(project)
    config = replace(config, env={"mine": replace(config.env["mine"], options={"reward": module.one})})  # type: ignore[call-arg]
    before = find_contents(config)["env.mine.reward"]
    (project / "neighbour.py").write_text("def one():\n    return 7.0\n")
    assert before.kind == "code" and before.digest and find_contents(config)["env.mine.reward"].digest != before.digest


def test_a_large_file_is_read_once_for_each_of_its_states(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "SMALL_BYTES", 8)
    read: list[Path] = []
    compute = checksums.compute_checksum
    monkeypatch.setattr(checksums, "compute_checksum", lambda path: (read.append(path), compute(path))[1])
    path = project / "rows.jsonl"
    first = digest_files([path])
    assert digest_files([path]) == first and len(read) == 1
    edit_answer(project)
    assert digest_files([path]) != first and len(read) == 2

"""The hub: asked once, and never waited for."""

from __future__ import annotations

import time

import pytest

from strop.data.sources import hub
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource

datasets = pytest.importorskip("datasets")


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    import huggingface_hub

    def refuse(*arguments, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


@pytest.mark.extensions
def test_an_unreachable_hub_is_said_at_once_and_says_what_to_do(unreachable):
    began = time.monotonic()
    with pytest.raises(
        DataError, match=r"the hub is unreachable \(no route to host\), and the dataset 'openai/gsm8k'.*local \.jsonl"
    ):
        DataSource(dataset_name="gsm8k").load_rows()
    assert time.monotonic() - began < 10


@pytest.mark.extensions
def test_a_cached_copy_is_used_with_a_warning_when_the_hub_is_away(unreachable, monkeypatch):
    table = datasets.Dataset.from_list([{"question": "1+1?", "answer": "Add.\n#### 2", "x": 1}] * 3)
    monkeypatch.setattr(hub, "_load_split", lambda name, subset, split, revision: table)
    with pytest.warns(UserWarning, match="cached copy of 'openai/gsm8k'"):
        rows = DataSource(dataset_name="gsm8k").load_rows()
    whole = {"question": "1+1?", "answer": "Add.\n#### 2", "x": 1}
    assert [(row.question, row.answer, dict(row.metadata)) for row in rows] == [("1+1?", "2", whole)] * 3


@pytest.mark.extensions
def test_a_built_in_name_sets_what_was_not_set(monkeypatch):
    asked = []

    def load(name, subset, split, revision):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(
            [{"prompt": [{"content": f"q{n}"}], "reward_model": {"ground_truth": "7"}} for n in range(10)]
        )

    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(hub, "_load_split", load)
    assert DataSource(dataset_name="DAPOMath17K").load_rows()[1].question == "q1"
    held = DataSource(dataset_name="DAPOMath17K", split_validation_size=0.3, part="validation", split="other").load_rows()
    assert len(held) == 3
    assert asked == [("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"), ("BytedTsinghua-SIA/DAPO-Math-17k", None, "other")]


def test_a_missing_column_names_the_keys_there_are(monkeypatch):
    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(hub, "_load_split", lambda *arguments: datasets.Dataset.from_list([{"question": "q", "answer": "a"}]))
    with pytest.raises(DataError, match=r"has no key 'problem'; its keys are \['answer', 'question'\]"):
        DataSource(dataset_name="someone/something").load_rows()
    with pytest.raises(DataError, match="has no key 'problem'"):
        DataSource(dataset_name="someone/something", split_validation_size=0.5, part="train").load_rows()


@pytest.mark.parametrize("in_terminal", [True, False])
def test_progress_bars_are_for_terminals_alone(monkeypatch, in_terminal):
    hidden = []
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: in_terminal, raising=False)
    monkeypatch.setattr(datasets, "disable_progress_bars", lambda: hidden.append(True))
    hub._hide_progress_bars()
    assert bool(hidden) is not in_terminal

"""Texts and paths as users write them: marks, encodings, home folders, values of the command line, keys and rows that cannot be meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.base_config import BaseConfig
from strop.config import TRAINING_RUNS, ConfigError, TrainingRunConfig, load_config
from strop.config.source.yaml_source import parse_override_value
from strop.config.source.yaml_text import YamlError
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.models.tokenizer_config import read_chat_template
from strop.storage.files import NotUtf8, read_text_file
from strop.types import user

USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ROOT: type[BaseConfig] = TRAINING_RUNS["grpo"]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows(path: Path, content: str | bytes, **keys: Any) -> list[Any]:
    return [(row.prompt, row.answer) for row in DataSource(dataset_name=write(path, content), **keys).load_rows()]


# --- byte order marks and encodings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_text_file, read_chat_template])
def test_a_byte_order_mark_is_no_part_of_any_text(read: Callable[[str], str], tmp_path: Path) -> None:
    assert read(write(tmp_path / "text.txt", "\ufeffhello: {{ reply }}")) == "hello: {{ reply }}"


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_nor_of_a_prompt(key: str, tmp_path: Path) -> None:
    text = write(tmp_path / "p.txt", "\ufeffSolve {question}")
    template = DataSource(dataset_name=write(tmp_path / "r.jsonl", '{"problem": "q", "answer": "1"}'), **{key: text})
    messages = template.make_prompt_template().render("q") if hasattr(template, "make_prompt_template") else ()
    assert "\ufeff" not in "".join(message.content for message in messages)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("één".encode("latin-1"), r"text.txt:1 is not UTF-8 text .the byte 0xe9"),
        ("one\ntwo\nthree é".encode("cp1252"), r"text.txt:3 is not UTF-8 text"),
        ("hello".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("hello".encode("utf-32"), "is UTF-32 text; save it as UTF-8"),
    ],
)
def test_other_encodings_are_named_with_the_line(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(NotUtf8, match=said):
        read_text_file(write(tmp_path / "text.txt", content))


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl"])
def test_a_data_file_in_another_encoding_is_called_that(suffix: str, tmp_path: Path) -> None:
    content = {"csv": "problem,answer\nq,1\né,2\n", "json": '[{"problem": "é"}]', "jsonl": '{"problem": "é"}\n'}[suffix]
    with pytest.raises(DataError, match="is not UTF-8 text") as error:
        rows(tmp_path / f"data.{suffix}", content.encode("latin-1"))
    assert ":0" not in str(error.value)


# --- home folders -------------------------------------------------------------------------------------------------------------


def test_every_path_of_a_configuration_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = [
        *("checkpointing.checkpoint_dir", "logger.log_dir", "policy.model_name", "policy.tokenizer.name"),
        *("data.train.dataset_name", "data.train.prompt_file", "data.train.system_prompt_file", "data.train.media_data_dir"),
        *("policy.generation.weight_sync.folder", "env.mine.reward", "env.mine.type"),
    ]
    given = [f"{key}=~/x/{number}" for number, key in enumerate(keys)]
    config: TrainingRunConfig = load_config(None, given, root=TRAINING_RUNS["grpo"], check=False).config
    for number, key in enumerate(keys):
        value: Any = config
        for name in key.split("."):
            inner = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
            inner = value.options.get(name) if inner is None and hasattr(value, "options") else inner
            value = inner[0] if isinstance(inner, tuple) else inner
        assert value == f"{tmp_path}/x/{number}", key


# --- values of the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("data.train.system_prompt", "Give the answer after ####", "Give the answer after ####"),
        ("run_name", "try #2", "try #2"),
        ("run_name", "#2", "#2"),
        ("data.train.system_prompt", "Answer: yes", "Answer: yes"),
        ("data.train.system_prompt", "&answer yes", "&answer yes"),
        ("data.train.system_prompt", "!important be short", "!important be short"),
        ("data.train.system_prompt", "- be short", "- be short"),
        ("env.mine.marker", "after #", "after #"),
        ("data.train.system_prompt", "'a # b'", "a # b"),
        ("policy.generation.stop_strings", "['#', 'a #b']", ["#", "a #b"]),
        ("run_name", "007", "007"),
        ("grpo.max_num_steps", "20", 20),
        ("data.train.system_prompt", "null", None),
    ],
)
def test_a_value_of_the_command_line_is_taken_whole(key: str, text: str, value: Any) -> None:
    assert parse_override_value(tuple(key.split(".")), text, ROOT) == value


@pytest.mark.parametrize("text", ["[1, 2] # two", "'quoted' # rest", "{a: 1} #x"])
def test_what_would_be_cut_off_behind_brackets_and_quotes_is_refused(text: str) -> None:
    with pytest.raises(YamlError, match="would be dropped as a comment"):
        parse_override_value(("env", "mine", "x"), text, ROOT)


# --- keys and rows that cannot be meant ----------------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("keys", [{"split": "test"}, {"split": "train[:10%]"}, {"subset": "main"}, {"revision": "abc"}])
def test_a_key_that_a_file_does_not_have_is_refused(keys: dict[str, str], tmp_path: Path) -> None:
    content = '{"problem": "q", "answer": "1"}\n'
    with pytest.raises(DataError, match="of which all rows are read"):
        rows(tmp_path / "data.jsonl", content, **keys)
    values = {"data": {"train": {"dataset_name": str(tmp_path / "data.jsonl"), **keys}}, "policy": {"model_name": "m"}}
    with pytest.raises(ConfigError, match=rf"data\.train\.{next(iter(keys))}: found"):
        load_config(None, root=TRAINING_RUNS["sft"], values=values)
    assert rows(tmp_path / "data.jsonl", content, split="train") == [("q", "1")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "answer,problem,answer\n1,q,2\n", "two columns named 'answer'"),
        ("a.jsonl", '{"problem": "q", "meta": {"x": 1, "x": 2}, "answer": "1"}\n', r"a.jsonl:1 has the key 'x' twice"),
        ("a.json", '[{"problem": "q", "answer": "1", "problem": "r"}]', "has an object with the key 'problem' twice"),
    ],
)
def test_of_two_columns_or_keys_of_one_name_none_is_chosen(name: str, content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        rows(tmp_path / name, content)


def test_a_long_field_of_a_csv_is_read_in_full(tmp_path: Path) -> None:
    ((prompt, answer),) = rows(tmp_path / "long.csv", f'problem,answer\n"{"x" * 300_000}",{"y" * 140_000}\n')
    assert (len(prompt), len(answer)) == (300_000, 140_000)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"role": "user", "content": "q"}]),
        json.dumps([{"from": "human", "value": "q"}], indent=2),
        repr([{"role": "user", "content": "q"}]),
    ],
)
def test_a_text_that_holds_messages_is_read_as_messages(text: str, tmp_path: Path) -> None:
    import csv

    path = tmp_path / "m.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], [text, "1"]])
    (row,) = DataSource(dataset_name=str(path), input_key="prompt").load_rows()
    assert row.prompt == (user("q"),)
    assert DataSource(rows=[{"problem": '[{"name": "x"}]', "answer": "1"}]).load_rows()[0].prompt == '[{"name": "x"}]'


UNREAD = [  # kind of run, settings of its entry, the key that it does not read
    ("sft", {"dataset_name": "d"}, {"chosen_key": "x"}),
    ("sft", {"dataset_name": "d"}, {"label_key": "x"}),
    ("dpo", {"dataset_name": "d"}, {"text_key": "x"}),
    ("rm", {"dataset_name": "d"}, {"label_key": "x"}),
    ("grpo", {"dataset_name": "d", "env_name": "e"}, {"tool_key": "x"}),
    ("grpo", {"dataset_name": "d", "env_name": "e"}, {"system_key": "x"}),
    ("grpo", {"env_name": "e"}, {"split": "test"}),
    ("grpo", {"env_name": "e"}, {"input_key": "x"}),
]


@pytest.mark.extensions
@pytest.mark.parametrize(("kind", "entry", "unread"), UNREAD)
def test_a_key_that_this_kind_of_run_or_task_does_not_read_is_refused(
    kind: str, entry: dict[str, str], unread: dict[str, str]
) -> None:
    values = {"policy": {"model_name": "m"}, "env": {"e": {"type": "arithmetic" if len(entry) == 1 else "math"}}}
    values = values if kind == "grpo" else {"policy": values["policy"]}
    (name,) = unread
    with pytest.raises(ConfigError, match=rf"data\.train\.{name}: found .*, which .* does not read"):
        load_config(None, root=TRAINING_RUNS[kind], values={**values, "data": {"train": {**entry, **unread}}})
    inherited = {"train": entry, "default": unread}
    load_config(None, root=TRAINING_RUNS[kind], values={**values, "data": inherited})


@pytest.mark.extensions
def test_texts_are_joined_only_where_their_column_is_named() -> None:
    values = {"data": {"train": {"dataset_name": "d", "characters_per_sample": 9}}, "policy": {"model_name": "m"}}
    with pytest.raises(ConfigError, match="only raw text is joined, and text_key names none"):
        load_config(None, root=TRAINING_RUNS["sft"], values=values)


UNREAD_COLUMNS = [  # reader, a row, settings of the source, what is said not to be read
    ("preferences", {"prompt": "q", "chosen": "a", "rejected": "b"}, {"messages_key": "talk"}, "messages_key=talk"),
    ("preferences", {"prompt": "q", "chosen": "a", "rejected": "b"}, {"output_key": "chosen"}, "output_key=chosen"),
    ("conversations", {"prompt": "q", "completion": "a"}, {"chosen_key": "completion"}, "chosen_key=completion"),
    ("conversations", {"messages": [USER, REPLY], "prompt": "q", "completion": "a"}, {"label_key": "x"}, "label_key=x"),
    ("conversations", {"text": "raw", "prompt": "q"}, {"text_key": "text", "input_key": "prompt"}, "input_key=prompt"),
    (
        "unpaired_preferences",
        {"prompt": "q", "completion": "a", "label": True, "messages": []},
        {"rejected_key": "completion"},
        "rejected_key=completion",
    ),
    ("load_rows", {"problem": "q", "answer": "a"}, {"messages_key": "talk"}, "messages_key=talk"),
]


@pytest.mark.parametrize(("read", "row", "keys", "said"), UNREAD_COLUMNS, ids=[each[3] for each in UNREAD_COLUMNS])
def test_a_key_that_names_a_column_and_is_not_read_is_said(
    read: str, row: dict[str, Any], keys: dict[str, str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "rows.jsonl", json.dumps(row) + "\n")
    source = DataSource(dataset_name=str(file), **keys)
    readers = DataSource if read == "load_rows" else pytest.importorskip("strop.extensions.recorded.examples")
    assert len(getattr(readers, read)(source)) == 1
    assert f"{said} is not read" in caplog.text


def test_keys_that_name_the_columns_that_are_read_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    preferences = pytest.importorskip("strop.extensions.recorded.examples").preferences
    file = write(tmp_path / "rows.jsonl", json.dumps({"q": "a", "good": "b", "bad": "c", "by": 1.0}) + "\n")
    keys = {"input_key": "q", "chosen_key": "good", "rejected_key": "bad", "margin_key": "by"}
    assert len(preferences(DataSource(dataset_name=str(file), **keys))) == 1
    assert "is not read" not in caplog.text

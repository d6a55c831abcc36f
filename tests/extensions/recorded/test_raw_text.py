"""Raw text: rows of one column, joined or one by one, without a prompt and without a chat template."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.sources.in_memory import ListRecords
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.extensions.recorded.examples import conversations
from strop.extensions.recorded.planned_groups import RecordedRules
from strop.extensions.recorded.raw_text import PackedTexts
from strop.models.chat_template import ChatTemplate
from strop.types import assistant
from support.chat_templates import FAMILIES, make_tokenizer
from support.recorded import demonstration_group

RULES = RecordedRules(max_length=64)


def text_source(folder: Path, *texts: Any, **options: Any) -> DataSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    return DataSource(dataset_name=str(path), text_key="text", **options)


def test_each_row_is_a_text_by_the_assistant_and_rows_without_one_are_left_out_and_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        examples = conversations(text_source(tmp_path, "one", "", None, "two words"))
    assert [example.messages for example in examples] == [(assistant("one"),), (assistant("two words"),)]
    assert (examples[0].question, examples[0].answer, examples[0].is_raw_text) == ("", "one", True)
    assert [example.id.rpartition(":")[2] for example in examples] == ["0", "3"]
    assert "2 of 4 records" in caplog.text and "have no text and are skipped" in caplog.text


def test_rows_are_joined_until_they_have_enough_characters_and_the_rest_is_a_sample_too(tmp_path):
    examples = conversations(text_source(tmp_path, "aaaa", "", "bbb", "cccccccc", "d", characters_per_sample=6))
    assert [example.answer for example in examples] == ["aaaa\nbbb", "cccccccc", "d"]
    assert [example.id.rpartition(":")[2] for example in examples] == ["0", "1", "2"]


@given(st.lists(st.text("ab ", max_size=9) | st.none(), min_size=1, max_size=12), st.integers(1, 20))
def test_joined_samples_have_every_text_once_in_order_and_enough_characters(texts, characters):
    rows = [{"text": text} for text in texts]
    kept = [text for text in texts if text]
    if not kept:
        with pytest.raises(DataError, match="has a text under 'text'"):
            PackedTexts(ListRecords("rows", rows), "text", characters)
        return
    samples = [record["text"] for record in PackedTexts(ListRecords("rows", rows), "text", characters)]
    assert "\n".join(samples) == "\n".join(kept)
    lengths = [len(sample.replace("\n", "")) for sample in samples]
    assert all(length >= characters for length in lengths[:-1]) and lengths[-1] > 0


@pytest.mark.parametrize("add_bos", [False, True])
def test_every_token_but_the_first_is_in_the_loss_and_no_template_is_rendered(add_bos):
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    (text, options) = ("Two and two are four.", RecordedRules(max_length=64, add_bos=add_bos))
    (example,) = conversations(DataSource(rows=[{"text": text}], text_key="text"))
    (rollout,) = demonstration_group(0, "data", example, ChatTemplate(tokenizer), options).rollouts
    expected = tokenizer(text)["input_ids"]
    bos = [] if not add_bos or tokenizer.bos_token_id in (None, expected[0]) else [tokenizer.bos_token_id]
    assert rollout.error is None and rollout.tokens().tolist() == [*bos, *expected, tokenizer.eos_token_id]
    assert rollout.prompt.tolist() == [*bos, expected[0]]
    assert [turn.author for turn in rollout.turns] == ["policy"]


def test_a_text_that_is_too_long_is_an_error_and_not_cut():
    (example,) = conversations(DataSource(rows=[{"text": "word " * 99}], text_key="text"))
    group = demonstration_group(0, "data", example, ChatTemplate(make_tokenizer(FAMILIES["chatml"])), RULES)
    assert "at most 64 fit" in group.errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_key": "content"}, r"has no key 'content'; its keys are \['id', 'text'\]"),
        ({"system_prompt": "Be kind."}, "text_key names raw text, which has no prompt"),
        ({"text_key": None, "characters_per_sample": 9}, "only raw text is joined; set text_key"),
    ],
)
def test_what_does_not_go_with_raw_text_is_an_error(options, message):
    with pytest.raises(DataError, match=message):
        conversations(DataSource(rows=[{"text": "a", "id": 1}], **{"text_key": "text", **options}))

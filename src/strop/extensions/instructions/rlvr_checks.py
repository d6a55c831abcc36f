"""The checks of RLVR-IFeval, and sentences, capital words and language of a text as IFEval counts and detects them.

The 25 constraints (Lambert et al. 2024, arXiv:2411.15124) count differently from IFEval's. Results equal those of open-instruct, which
trained on them, except for sections: numbered marks count, as in IFEval, while in open-instruct a text without marks counts as one
section. Responses are untrusted: called in the scoring pool.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
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


_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s")


def _compare_count(number: int, quantifier: str, wanted: int, tolerance: int) -> bool:
    match quantifier:
        case "at least":
            return number >= wanted
        case "at most":
            return number <= wanted
        case "around":
            return abs(number - wanted) <= tolerance
    raise ValueError(f"the quantifier {quantifier!r} is none of at least, at most, around")


def verify_keywords(text: str, *, keyword_list: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def verify_keyword_frequency(text: str, *, word: str, N: int) -> bool:
    return re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N


def validate_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(word.lower() in text.lower() for word in forbidden_words)


def verify_letter_frequency(text: str, *, letter: str, N: int) -> bool:
    return text.count(letter) == N


def validate_response_language(text: str, *, language: str) -> bool:
    return detect_language(text) == language


def verify_paragraph_count(text: str, *, N: int) -> bool:
    parts = "\n".join(line.strip() for line in text.splitlines()).split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def validate_word_constraint(text: str, *, N: int, quantifier: str) -> bool:
    return _compare_count(len(text.split()), quantifier, N, max(round(N * 0.1), 1))


def verify_sentence_constraint(text: str, *, N: int, quantifier: str) -> bool:
    return _compare_count(len(_SENTENCE_END.split(text)), quantifier, N, 1)


def validate_paragraphs(text: str, *, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


def verify_postscript(text: str, *, postscript_marker: str) -> bool:
    _, marker, rest = text.partition(postscript_marker)
    return len((marker + rest).strip()) > len(postscript_marker)


def validate_placeholders(text: str, *, N: int) -> bool:
    return len(re.findall(r"\[(.*?)\]", text)) >= N


def verify_bullet_points(text: str, *, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def validate_title(text: str) -> bool:
    return re.search(r"<<(.*?)>>", text) is not None


def validate_choice(text: str, *, options: Sequence[str]) -> bool:
    return any(option in text for option in options)


def validate_highlighted_sections(text: str, *, N: int) -> bool:
    return len(re.findall(r"\*(.*?)\*", text)) >= N


def validate_sections(text: str, *, N: int, section_splitter: str) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_splitter)}\s?\d+\s?", text, re.IGNORECASE)) >= N


def validate_json_format(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, *, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def validate_two_responses(text: str) -> bool:
    parts = text.split("******")
    return len(parts) == 2 and parts[0].strip() != parts[1].strip()


def validate_uppercase(text: str) -> bool:
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    return text == text.lower()


def validate_frequency_capital_words(text: str, *, N: int, quantifier: str) -> bool:
    return _compare_count(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, max(round(N * 0.1), 1))


def validate_end(text: str, *, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


def validate_quotation(text: str) -> bool:
    return text.startswith('"') and text.endswith('"')


def validate_no_commas(text: str) -> bool:
    return "," not in text


RLVR_CHECKS: dict[str, Callable[..., bool]] = {
    each.__name__: each
    for each in (
        verify_keywords,
        verify_keyword_frequency,
        validate_forbidden_words,
        verify_letter_frequency,
        validate_response_language,
        verify_paragraph_count,
        validate_word_constraint,
        verify_sentence_constraint,
        validate_paragraphs,
        verify_postscript,
        validate_placeholders,
        verify_bullet_points,
        validate_title,
        validate_choice,
        validate_highlighted_sections,
        validate_sections,
        validate_json_format,
        validate_repeat_prompt,
        validate_two_responses,
        validate_uppercase,
        validate_lowercase,
        validate_frequency_capital_words,
        validate_end,
        validate_quotation,
        validate_no_commas,
    )
}

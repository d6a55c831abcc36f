"""The 25 constraints of RLVR-IFeval (Lambert et al. 2024, arXiv:2411.15124), based on IFEval's instructions, for training.

They count differently from IFEval's. Results equal those of open-instruct, which trained on them, except for sections: numbered
marks count, as in IFEval, while in open-instruct a text without marks counts as one section. Responses are untrusted: called in
the scoring pool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from strop.environments.scoring.text_language import detect_language

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s")


def _compare(number: int, quantifier: str, wanted: int, tolerance: int) -> bool:
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
    return _compare(len(text.split()), quantifier, N, max(round(N * 0.1), 1))


def verify_sentence_constraint(text: str, *, N: int, quantifier: str) -> bool:
    return _compare(len(_SENTENCE_END.split(text)), quantifier, N, 1)


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
    return _compare(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, max(round(N * 0.1), 1))


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

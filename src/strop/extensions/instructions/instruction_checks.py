"""Instructions by name, and checks of whether a response follows one: strictly, or loosely as defined by IFEval."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from strop.extensions.instructions.rlvr_checks import RLVR_CHECKS, count_capital_words, count_sentences, detect_language
from strop.packages import is_installed
from strop.user_code import suggest_names

RELATIONS = ("less than", "at least")
CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _compare(number: int, relation: str, threshold: int) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"the relation {relation!r} is none of {', '.join(RELATIONS)}")
    return number < threshold if relation == "less than" else number >= threshold


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in keywords)


def has_keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(keyword.strip(), text, re.IGNORECASE)), relation, frequency)


def has_no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def has_letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def is_in_language(text: str, *, language: str) -> bool:
    return detect_language(text) in (language, None)


def has_number_of_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def has_number_of_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are separated by ``***``. Only the first and the last may be empty; they then do not count."""
    first, *others = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    ends = [part for part in (first, *others[-1:]) if part]
    return all(others[:-1]) and len(ends) + len(others[:-1]) == num_paragraphs


def has_number_of_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def has_first_word_of_paragraph(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """A paragraph's position counts empty ones but the number of paragraphs does not, as in the original."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    number = sum(bool(part) for part in paragraphs)
    if not 1 <= nth_paragraph <= number or not paragraphs[nth_paragraph - 1]:
        return False
    word = re.split(r"[.,?!'\"]", paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"'))[0]
    return number == num_paragraphs and word.lower() == first_word.lower()


def has_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
    return re.search(pattern, text.lower()) is not None


def has_bullets(text: str, *, num_bullets: int) -> bool:
    stars, dashes = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE), re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def is_constrained_response(text: str) -> bool:
    return any(response in text for response in CONSTRAINED_RESPONSES)


def has_highlights(text: str, *, num_highlights: int) -> bool:
    single = [found for found in re.findall(r"\*[^\n\*]*\*", text) if found.strip("*").strip()]
    double = [found for found in re.findall(r"\*\*[^\n\*]*\*\*", text) if found[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:  # spelled as in the rows
    return len(re.findall(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) >= num_sections


def is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def has_two_responses(text: str) -> bool:
    """Two different responses separated by ``******``, which may also come before and after them."""
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with_phrase(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def has_capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(count_capital_words(text), capital_relation, capital_frequency)


def is_english_in_capitals(text: str) -> bool:
    return text.isupper() and detect_language(text) in ("en", None)


def is_english_in_lowercase(text: str) -> bool:
    return text.islower() and detect_language(text) in ("en", None)


def has_no_comma(text: str) -> bool:
    return "," not in text


def is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


IFEVAL_CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_frequency,
    "keywords:forbidden_words": has_no_forbidden_words,
    "keywords:letter_frequency": has_letter_frequency,
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_number_of_sentences,
    "length_constraints:number_paragraphs": has_number_of_paragraphs,
    "length_constraints:number_words": has_number_of_words,
    "length_constraints:nth_paragraph_first_word": has_first_word_of_paragraph,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_constrained_response,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": has_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with_phrase,
    "startend:quotation": is_quoted,
    "change_case:capital_word_frequency": has_capital_word_frequency,
    "change_case:english_capital": is_english_in_capitals,
    "change_case:english_lowercase": is_english_in_lowercase,
    "punctuation:no_comma": has_no_comma,
}


INSTRUCTIONS: Mapping[str, Callable[..., bool]] = {**IFEVAL_CHECKS, **RLVR_CHECKS}
PACKAGES = {  # required by instructions in addition to Strop's own
    "language:response_language": "langdetect",
    "change_case:english_capital": "langdetect",
    "change_case:english_lowercase": "langdetect",
    "validate_response_language": "langdetect",
    "length_constraints:number_sentences": "nltk",
    "change_case:capital_word_frequency": "nltk",
}
STRICTLY, LOOSELY = 2.0, 1.0  # scores


def find_fault(name: str, options: Mapping[str, Any]) -> str | None:
    """Return why an instruction with these options cannot be followed, None if it can be checked."""
    if name not in INSTRUCTIONS:
        return f"there is no instruction {name!r}{suggest_names(name, INSTRUCTIONS)}"
    wanted = set(inspect.signature(INSTRUCTIONS[name]).parameters) - {"text"}
    if wanted != set(options):
        takes, given = (", ".join(sorted(names)) or "nothing" for names in (wanted, options))
        return f"the instruction {name} takes {takes}, but has {given}"
    return None


def find_missing_package(name: str) -> str | None:
    """Return the package required by an instruction, if it is not installed."""
    package = PACKAGES.get(name)
    return None if package is None or is_installed(package) else package


def load_instruction() -> Callable[..., Callable[[], float]]:
    return prepare_instruction


def prepare_instruction(name: str, options: Mapping[str, Any], text: str) -> Callable[[], float]:
    """Return a function that gives 2 if a response follows an instruction, 1 if only one of its loose variants does, and
    otherwise 0.
    """
    _load_models(PACKAGES.get(name))
    return lambda: score_instruction(name, options, text)


def score_instruction(name: str, options: Mapping[str, Any], text: str) -> float:
    check, text = INSTRUCTIONS[name], text if name in IFEVAL_CHECKS else text.strip()

    def follows(response: str) -> bool:
        return bool(response.strip()) and check(response, **options)

    if follows(text):
        return STRICTLY
    return LOOSELY if any(map(follows, list_loose_variants(text))) else 0.0


def list_loose_variants(text: str) -> list[str]:
    """Return a response without its first line, its last line, both, and each of these without asterisks."""
    lines = text.split("\n")
    shorter = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [*shorter, *(variant.replace("*", "") for variant in (text, *shorter))]


@lru_cache(maxsize=4)
def _load_models(package: str | None) -> None:
    """Load a package's files, once, before a process is forked that may not read files."""
    from strop.extensions.instructions import rlvr_checks

    if package == "langdetect":
        rlvr_checks.detect_language("This is a sentence in English.")
    elif package == "nltk":
        rlvr_checks.count_capital_words("ONE")
        rlvr_checks.count_sentences("One. Two.")

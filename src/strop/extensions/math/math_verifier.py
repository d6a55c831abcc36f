"""Whether an answer equals the reference: mathematically, by one of several methods, or by the letter of a multiple-choice question, as
simple-evals extracts it in English or in one of many languages.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from strop.environments.answers import (
    extract_final_answer,
    extract_last_boxed,
    extract_last_boxes,
    extract_last_number,
    extract_stated_number,
    is_integer,
    normalize_answer,
)
from strop.environments.base import EnvironmentConfigError
from strop.environments.scoring.scoring_pool import ScoringResult, get_scoring_pool
from strop.environments.verifiers.base import AnswerVerifier, Reply, Score
from strop.extensions.math.dapo_verifier import LAST_CHARACTERS, NO_ANSWER, extract_dapo_answer
from strop.thoughts import read_answer
from strop.types import Task

# Phrases that announce a final answer. The first of these that is followed by a letter counts, anywhere in the text.
ANNOUNCEMENTS = (
    *(r"Answer\s*:", "Answer\\s*:\u200b\u200b\u200b\u200b\u200b\u200b"),
    *(r"উত্তর\s*:", r"उत्तर\s*:", "উত্তরঃ", r"Antwort\s*:", r"답변\s*:", r"정답\s*:", r"답\s*:"),
    *(r"答案\s*：", r"答案\s*:", r"答\s*：", r"答\s*:", r"答复\s*：", r"答曰\s*："),
    *(
        "الإجابة:",
        "الجواب:",
        "إجابة:",
        "الإجابة النهائية:",
        "الإجابة الصحيحة:",
        "الإجابة الصحيحة هي:",
        "الإجابة هي:",
        "الجواب النهائي:",
    ),
    *(r"Respuesta\s*:", r"Risposta\s*:", r"答え\s*:", r"答え\s*：", r"回答\s*:", r"回答\s*：", r"解答\s*:"),
    *(r"Jawaban\s*:", r"Réponse\s*:", r"Resposta\s*:", r"Jibu\s*:", r"Idahun\s*:"),
    *(r"Ìdáhùn\s*:", r"Idáhùn\s*:", r"Àmọ̀nà\s*:", r"Àdáhùn\s*:", r"Ànúgọ\s*:", r"Àṣàyàn\s*:"),
)
_ENGLISH = re.compile(r"Answer\s*:[ \t]*([A-Z])", re.IGNORECASE)
_MULTILINGUAL = tuple(
    re.compile(f"{announcement}[ \t]*([A-D]|[أ-د]|[অ]|[ব]|[ড]|[ঢ]|[Ａ]|[Ｂ]|[Ｃ]|[Ｄ])", re.IGNORECASE)
    for announcement in ANNOUNCEMENTS
)
_ALONE = re.compile(r"\(?([A-Za-zأ-دঅবডঢＡ-Ｄ])[).]?")
_LETTERS = str.maketrans(
    dict(zip("أبجدঅবডঢ", "ABCDABCD", strict=True)) | {chr(0xFF21 + n): letter for n, letter in enumerate(ascii_uppercase)}
)
_MARKUP = (*("**", "$\\boxed{", "}$", "\\$", "$\\text{", "$", "\\mathrm{", "\\{", "\\text", "\\(", "\\mathbf{", "{", "\\boxed"),)

_STATEMENTS = 1000  # only this many last ones are read
_STATEMENT = 200  # characters after "Answer:" in which the letter is searched
_STATED = re.compile(rf"answer[*_}}\s]*[:：]|answer\s+is\b\s*:?|{'|'.join(ANNOUNCEMENTS[2:])}", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\{")
_AROUND_LETTER = re.compile(
    r"\\(?:boxed|text(?:bf|it|rm)?|math(?:bf|it|rm|sf)|left|right|[,;! ()\[\]])|\b(?:option|choice)\b|"
    r"[\s*_`~$(){}\[\]<>.,;:!?\"'|。．、，：）（【】「」\u200b]",
    re.IGNORECASE,
)


def extract_english_choice(text: str) -> str | None:
    """Return the letter after the first "Answer:", or None."""
    found = _ENGLISH.search(remove_markup(text))
    return found[1] if found else None


def extract_multilingual_choice(text: str) -> str | None:
    """Return the letter, in Latin script, after the first announcement of the list that is followed by one; None if there is
    none.
    """
    text = remove_markup(text)
    found = next(filter(None, (pattern.search(text) for pattern in _MULTILINGUAL)), None)
    return found[1].translate(_LETTERS) if found else None


def extract_stated_choice(text: str, options: int = len(ascii_uppercase)) -> str | None:
    """Return the letter stated last in a reply, in Latin script, or None.

    Strict: a statement is "Answer:", in any of its languages, or a ``\\boxed``, with the letter of one of the ``options`` and
    nothing but punctuation after it on the line; or a reply that is only a letter.
    """
    ends = [found.end() for found in _STATED.finditer(text)][-_STATEMENTS:]
    statements = [(end, text[end : end + _STATEMENT].lstrip().partition("\n")[0]) for end in ends]
    starts = [found.start() for found in _BOX.finditer(text)][-_STATEMENTS:]
    boxes = ((start, extract_last_boxed(text[start : start + _STATEMENT])) for start in starts)
    statements += [(start, boxed) for start, boxed in boxes if boxed is not None]
    for _, statement in sorted(statements, reverse=True):
        if (letter := _read_letter_alone(statement, options)) is not None:
            return letter
    return _read_letter_alone(text, options) if len(text) < _STATEMENT else None


def _read_letter_alone(text: str, options: int) -> str | None:
    """Return an option's letter if a text is nothing but that letter, markup and punctuation; otherwise None."""
    letter = _AROUND_LETTER.sub("", text).translate(_LETTERS).upper()
    return letter if len(letter) == 1 and letter in ascii_uppercase[:options] else None


def remove_markup(text: str) -> str:
    """Remove Markdown and LaTeX around a letter."""
    for markup in _MARKUP:
        text = text.replace(markup, "")
    return text


STRICT = "strict_multichoice"
CHOICE_EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "english_multichoice": extract_english_choice,
    "multilingual_multichoice": extract_multilingual_choice,
}


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceVerifier(AnswerVerifier):
    """1 if the chosen letter is the reference's: after "Answer:", otherwise the last ``\\boxed``, otherwise the whole answer if
    it is a letter.
    """

    is_accuracy: ClassVar[bool] = True

    language: Literal["english", "multilingual"] = "english"  # multilingual: "Answer:" in 20 languages, letters of four scripts

    @property
    def needs_answer(self) -> bool:
        return True

    def score(self, task: Task, reply: Reply) -> bool:
        wanted = self._read_letter(task.answer) or remove_markup(task.answer).strip().upper()
        return self.find_answer(reply) == wanted

    def find_answer(self, reply: Reply) -> str | None:
        return self._read_letter(self.read(reply) or "")

    def _read_letter(self, text: str) -> str | None:
        if (letter := CHOICE_EXTRACTORS[f"{self.language}_multichoice"](text)) is not None:
            return letter.upper()
        alone = _ALONE.fullmatch(remove_markup(extract_last_boxed(text) or text).strip())
        return alone[1].upper().translate(_LETTERS) if alone else None


MathMethod = Literal[
    "math_verify",
    "exact",
    "dapo",
    "multilingual",
    "boxed",
    "olympiad",
    "minerva",
    "number",
    "strict_multichoice",
    "english_multichoice",
    "multilingual_multichoice",
]

SCORERS = "strop.extensions.math.math_scorers"
NO_ROW: Mapping[str, Any] = MappingProxyType({})
REPORTED = ("boxed", "olympiad", "minerva")  # methods that read only the last box
EXACT = 1e-8  # OlympiadBench's tolerance if a problem gives none

_ANNOUNCED = re.compile(f"(?:{'|'.join(ANNOUNCEMENTS)})[ \t\u200b]*([^\n]+)", re.IGNORECASE)
_SIGNS = str.maketrans({"٫": ".", "٬": ",", "．": ".", "，": ",", "−": "-", "－": "-", "％": "%"})


@dataclass(frozen=True, kw_only=True)
class MathVerifier(AnswerVerifier):
    """1 if the answer equals the reference. An answer that cannot be checked within the limits gets 0 and counts as
    ``unverified``.
    """

    is_accuracy: ClassVar[bool] = True

    method: Literal["math_verify", "exact", "dapo", "multilingual", "boxed", "olympiad", "minerva", "number"] = "math_verify"
    num_workers: int = 4  # processes that check answers, started on demand
    timeout_s: float = 5.0  # CPU seconds to check one answer

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError(
                f"num_workers is {self.num_workers} and timeout_s is {self.timeout_s}; both must be positive"
            )

    @property
    def needs_answer(self) -> bool:
        return True

    async def score(self, task: Task, reply: Reply) -> Score:
        text = self.read(reply)
        if text is None:
            return Score(0.0, {"unverified": 0.0})
        workers, limit = self.num_workers, self.timeout_s
        checked = await verify_answer(self.method, task.answer, text, task.metadata, num_workers=workers, timeout_s=limit)
        return Score(checked.value or 0.0, {"unverified": float(checked.failure is not None)})

    def find_answer(self, reply: Reply) -> str | None:
        text = self.read(reply)
        return None if text is None else find_math_answer(self.method, text)


async def verify_math(
    method: MathMethod, reference: str, text: str, row: Mapping[str, Any] = NO_ROW, *, num_workers: int, timeout_s: float
) -> ScoringResult:
    """Compare the answer in a reply, without its thoughts, with the reference."""
    return await verify_answer(method, reference, read_answer(text), row, num_workers=num_workers, timeout_s=timeout_s)


async def verify_answer(
    method: MathMethod, reference: str, text: str, row: Mapping[str, Any] = NO_ROW, *, num_workers: int, timeout_s: float
) -> ScoringResult:
    """Compare the answer in a text with the reference; see ``MathEnvironment`` for the methods. ``row`` is the task's data row."""
    pool = get_scoring_pool(num_workers)
    if method in REPORTED or method == "number":
        return await _verify_reported(method, reference, text, row, num_workers=num_workers, timeout_s=timeout_s)
    if method == "dapo":
        return await pool.call(
            "dapo", timeout_s, loader=f"{SCORERS}:load_dapo", reference=reference, answer=text[-LAST_CHARACTERS:]
        )
    if method == STRICT:
        return ScoringResult(float(extract_stated_choice(text, count_options(row)) == reference.strip().upper()))
    if extract_choice := CHOICE_EXTRACTORS.get(method):
        expected = remove_markup(reference) if method == "english_multichoice" else reference
        return ScoringResult(float(extract_choice(text) == expected))
    if method == "multilingual":
        reference, text = in_western_digits(reference), find_announced_answer(text)
    boxed = extract_last_boxed(text)
    answer = extract_final_answer(text) if method == "exact" else boxed
    expected = normalize_answer(reference)
    if answer is not None:
        normalized = normalize_answer(answer)
        both_integers = is_integer(normalized) and is_integer(expected)  # integers need no symbolic comparison
        if not normalized or normalized == expected or both_integers or method == "exact":
            return ScoringResult(float(bool(normalized) and normalized == expected))
    elif method == "exact":
        return ScoringResult(0.0)
    answer = text if boxed is None else f"\\boxed{{{boxed}}}"  # the same for all texts that end in it, so it is cached
    return await pool.call("math_verify", timeout_s, loader=f"{SCORERS}:load_math_verify", reference=reference, answer=answer)


async def _verify_reported(
    method: MathMethod, reference: str, text: str, row: Mapping[str, Any], *, num_workers: int, timeout_s: float
) -> ScoringResult:
    """Compare the last box, or for ``number`` the number stated last, with the reference."""
    if method == "number":
        return ScoringResult(
            float((given := extract_stated_number(text)) is not None and given == extract_last_number(reference))
        )
    tolerances = read_tolerances(row) if method == "olympiad" else (EXACT,)
    several = method == "olympiad" and bool(row.get("is_multiple_answer"))
    answer = extract_last_boxes(text) if several else extract_last_boxed(text)
    if not answer:
        return ScoringResult(0.0)
    expected, normalized = normalize_answer(reference), normalize_answer(answer)
    both_integers = is_integer(normalized) and is_integer(expected) and tolerances == (EXACT,)
    if normalized == expected or both_integers:
        return ScoringResult(float(normalized == expected))
    arguments: dict[str, Any] = {"method": method, "reference": reference, "answer": answer, "tolerances": tolerances}
    return await get_scoring_pool(num_workers).call(
        "reported_math", timeout_s, loader=f"{SCORERS}:load_reported_math", **arguments
    )


def count_options(row: Mapping[str, Any]) -> int:
    """Return the number of options of a row's question; 26 if not given."""
    choices = row.get("choices")
    return len(choices) if isinstance(choices, list | tuple) and choices else 26


def read_tolerances(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the absolute tolerance of each answer from OlympiadBench's column ``error``: one for all, or several separated by
    commas.
    """
    try:
        return tuple(float(each) if each.strip() else EXACT for each in str(row.get("error") or EXACT).split(","))
    except ValueError:
        return (EXACT,)


def find_math_answer(method: MathMethod, text: str, row: Mapping[str, Any] = NO_ROW) -> str | None:
    """Return the answer in a normal form, for majority votes."""
    if method == "dapo":
        stated = extract_dapo_answer(text)
        return None if stated == NO_ANSWER else stated
    if method == STRICT:
        return extract_stated_choice(text, count_options(row))
    if extract_choice := CHOICE_EXTRACTORS.get(method):
        return extract_choice(text)
    if method == "number":
        return None if (number := extract_stated_number(text)) is None else str(number)
    if method in REPORTED:
        answer = extract_last_boxes(text) if row.get("is_multiple_answer") else extract_last_boxed(text)
    else:
        answer = extract_final_answer(find_announced_answer(text) if method == "multilingual" else text)
    return normalize_answer(answer) if answer else None


def in_western_digits(text: str) -> str:
    """Convert digits of any script to 0-9, and the signs of numbers to English notation: ٣٫٥ becomes 3.5."""
    return "".join(
        each if each.isascii() or (digit := unicodedata.decimal(each, None)) is None else str(digit)
        for each in text.translate(_SIGNS)
    )


def find_announced_answer(text: str) -> str:
    """Return the last box, otherwise the text after the last "Answer:" in any language (boxed), otherwise the text; in Western
    digits.
    """
    text = in_western_digits(text)
    if extract_last_boxed(text) is not None:
        return text
    announced = _ANNOUNCED.findall(text)
    answer = announced[-1].strip().strip("*").strip().rstrip("。.।") if announced else ""
    return f"\\boxed{{{extract_final_answer(answer) or answer}}}" if answer else text

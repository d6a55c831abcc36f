"""The letter that answers a multiple-choice question, as simple-evals extracts it: in English, or in one of many languages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import ClassVar, Literal

from strop.environments.answers import extract_last_boxed
from strop.environments.verifiers.base import AnswerVerifier, Reply
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

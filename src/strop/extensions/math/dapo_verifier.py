"""DAPO's check of an answer (2503.14476): the text after the last "Answer:" equals the reference answer once both are normalized.

The normalization is Minerva's (2206.14858, appendix D.1), which other libraries also use with DAPO's recipes.
"""

from __future__ import annotations

import re

LAST_CHARACTERS = 300  # last characters of the completion, in which the answer is searched
NO_ANSWER = "[INVALID]"

_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = {  # in this order
    "an ": "",
    "a ": "",
    ".$": "$",
    "\\$": "",
    "\\ ": "",
    " ": "",
    "mbox": "text",
    ",\\text{and}": ",",
    "\\text{and}": ",",
    "\\text{m}": "\\text{}",
}
# Units, words and notation without meaning, in the order of their removal.
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet"),
    *("minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REWRITTEN = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # keep only the formula between dollar signs
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def score_dapo(reference: str, answer: str) -> float:
    """Return 1 if the last stated answer is the reference, else 0."""
    return float(extract_dapo_answer(answer) == normalize_dapo_answer(reference))


def extract_dapo_answer(text: str) -> str:
    """Return the normalized answer stated last in a completion, or "[INVALID]"."""
    stated = _ANSWER.findall(text[-LAST_CHARACTERS:])
    return normalize_dapo_answer(stated[-1] if stated else NO_ANSWER)


def normalize_dapo_answer(answer: str) -> str:
    answer = answer.rpartition("=")[2]
    for text, instead in _REPLACED.items():
        answer = answer.replace(text, instead)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    for pattern, instead in _REWRITTEN:
        answer = pattern.sub(instead, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()

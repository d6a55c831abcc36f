"""Instructions by name, and checks of whether a response follows one: strictly, or loosely as defined by IFEval."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from strop.environments.scoring.ifeval_checks import IFEVAL_CHECKS
from strop.environments.scoring.rlvr_checks import RLVR_CHECKS
from strop.packages import is_installed
from strop.user_code import suggest_names

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
    from strop.environments.scoring import text_language

    if package == "langdetect":
        text_language.detect_language("This is a sentence in English.")
    elif package == "nltk":
        text_language.count_capital_words("ONE")
        text_language.count_sentences("One. Two.")

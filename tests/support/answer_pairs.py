"""The table of answer pairs (``tests/fixtures/answer_pairs.yaml``), and what each library says of a row."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from strop.environments.answers import extract_last_boxed
from strop.extensions.math.math_verifier import extract_english_choice

TABLE = Path(__file__).parents[1] / "fixtures" / "answer_pairs.yaml"
OURS, HOSTILE, ROW = "ours", "hostile", "row"
LIBRARIES: Mapping[str, tuple[str, ...]] = {  # that are asked about the rows of a method
    "boxed": ("math_verify", "lm_eval"),
    "olympiad": ("math_verify",),
    "minerva": ("math_verify",),
    "number": ("math_verify", "lm_eval"),
    "strict_multichoice": ("simple_evals",),
}


@dataclass(frozen=True)
class AnswerPair:
    """A row. ``differs``: of Strop or a library the reason why it decides otherwise than the verdict by hand."""

    method: str
    text: str
    reference: str
    right: bool
    why: str
    row: Mapping[str, Any] = field(default_factory=dict)  # of the data
    hostile: bool = False  # must not be computed in this process
    differs: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method}: {self.text!r:.80} beside {self.reference!r:.60} ({self.why})"


def read_answer_pairs() -> tuple[list[AnswerPair], dict[str, dict[str, str]]]:
    """Return the rows, and the reasons by whose they are and by name."""
    content = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    reasons = content.pop("reasons", {})
    return [_read_row(method, each) for method, rows in content.items() for each in rows], reasons


def _read_row(method: str, values: list[Any]) -> AnswerPair:
    text, reference, verdict, why, *more = values
    more = dict(more[0]) if more else {}
    assert verdict in ("right", "wrong"), values
    row, hostile = more.pop(ROW, {}), more.pop(HOSTILE, False)
    if method == "strict_multichoice":
        row = {"choices": ["a", "b", "c", "d"], **row}
    return AnswerPair(method, text, reference, verdict == "right", why, row, hostile, more)


def make_math_verify() -> Callable[[AnswerPair], bool]:
    """Return math-verify's verdict, with its own settings, in this process."""
    from math_verify import parse, verify

    def decide(pair: AnswerPair) -> bool:
        expected, given = (parse(text, parsing_timeout=None) for text in (f"\\boxed{{{pair.reference}}}", pair.text))
        return bool(verify(expected, given, timeout_seconds=None))

    return decide


def make_simple_evals() -> Callable[[AnswerPair], bool]:
    """Return the verdict of simple-evals, whose expression Strop has under the name english_multichoice."""
    return lambda pair: extract_english_choice(pair.text) == pair.reference


def make_lm_eval() -> Callable[[AnswerPair], bool] | None:
    """Return the verdict of lm-eval's hendrycks_math, and for numbers of its gsm8k; None where it is not installed."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        return None
    tasks = Path(found.origin).parent / "tasks"
    spec = importlib.util.spec_from_file_location("hendrycks_math_utils", tasks / "hendrycks_math" / "utils.py")
    assert spec is not None and spec.loader is not None
    hendrycks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hendrycks)
    gsm8k = yaml.safe_load((tasks / "gsm8k" / "gsm8k.yaml").read_text())
    (pattern,) = [each["filter"][0]["regex_pattern"] for each in gsm8k["filter_list"] if each["name"] == "flexible-extract"]

    def decide(pair: AnswerPair) -> bool:
        if pair.method == "number":
            numbers = [next(filter(None, groups), "") for groups in re.findall(pattern, pair.text)]
            plain = [re.sub(r",|\$|\.$", "", text) for text in (numbers[-1] if numbers else "", pair.reference)]
            return plain[0] == plain[1]
        boxed = extract_last_boxed(pair.text)
        return boxed is not None and bool(hendrycks.is_equiv(boxed, pair.reference))

    return decide

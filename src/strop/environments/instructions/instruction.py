"""The instructions of a row, and a check of which ones a reply follows."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from strop.data.sources.records import DataError
from strop.environments.base import EnvironmentConfigError
from strop.environments.scoring.instruction_checks import LOOSELY, PACKAGES, STRICTLY, find_fault, find_missing_package
from strop.environments.scoring.scoring_pool import get_scoring_pool
from strop.environments.scoring.text_language import has_sentence_model
from strop.packages import install_command
from strop.thoughts import read_answer


@dataclass(frozen=True)
class Instruction:
    """An instruction by its name in IFEval or RLVR-IFeval, with its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class FollowedInstructions:
    """Which instructions a reply follows, in their order."""

    strictly: tuple[bool, ...]
    loosely: tuple[bool, ...]
    unverified: bool  # one of them could not be checked within the limits, and counts as not followed


def read_instructions(row: Mapping[str, Any], where: str) -> tuple[Instruction, ...]:
    """Return the instructions of a row of IFEval (``instruction_id_list``, ``kwargs``) or of RLVR-IFeval (``ground_truth``).

    Raises DataError, and EnvironmentConfigError where a package is missing.
    """
    try:
        found = _read_ifeval(row) if "instruction_id_list" in row else _read_rlvr(row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{where} has no instructions that can be read ({type(error).__name__}: {error}). A row has the columns "
            "instruction_id_list and kwargs, as IFEval's, or ground_truth with func_name, as RLVR-IFeval's"
        ) from error
    if not found:
        raise DataError(f"{where} has no instructions; leave it out")
    for each in found:
        if fault := find_fault(each.name, each.options):
            raise DataError(f"{where}: {fault}. Fix the row, or leave it out")
        _check_packages(each.name)
    return found


def _read_ifeval(row: Mapping[str, Any]) -> tuple[Instruction, ...]:
    given = [json.loads(each) if isinstance(each, str) else each or {} for each in row["kwargs"]]
    options = [{key: value for key, value in each.items() if value is not None} for each in given]
    return tuple(Instruction(name, each) for name, each in zip(row["instruction_id_list"], options, strict=True))


def _read_rlvr(row: Mapping[str, Any]) -> tuple[Instruction, ...]:
    given = row["ground_truth"]
    constraint = dict(json.loads(given) if isinstance(given, str) else given)
    name = constraint.pop("func_name")
    return (Instruction(name, {key: value for key, value in constraint.items() if value is not None}),)


@cache
def _check_packages(name: str) -> None:
    """Raise EnvironmentConfigError if a package is missing, and warn if its data is missing."""
    if package := find_missing_package(name):
        raise EnvironmentConfigError(f"the instruction {name} needs the package {package}: {install_command('ifeval')}")
    if PACKAGES.get(name) == "nltk" and "sentences" in name and not has_sentence_model():
        warnings.warn(
            "NLTK's model of sentences is not installed: sentences are told apart with a list of abbreviations, and their number may "
            "differ from what IFEval reports. Install it with `python -m nltk.downloader punkt_tab`",
            stacklevel=2,
        )


def read_response(text: str, opening: str = "") -> str:
    """Return the reply after its thoughts, without the white space between them."""
    answer = read_answer(text, opening)
    return answer if answer == text else answer.strip()


async def check_instructions(
    instructions: Sequence[Instruction], text: str, *, num_workers: int, timeout_s: float
) -> FollowedInstructions:
    """Check a response in the scoring pool, whose workers can read this machine's files, because NLTK loads its data from there."""
    pool = get_scoring_pool(num_workers, isolated=False)
    scores = await asyncio.gather(
        *(pool.call("instruction", timeout_s, name=each.name, options=dict(each.options), text=text) for each in instructions)
    )
    return FollowedInstructions(
        strictly=tuple(score.value == STRICTLY for score in scores),
        loosely=tuple((score.value or 0.0) >= LOOSELY for score in scores),
        unverified=any(score.value is None for score in scores),
    )

"""A problem that a program solves, with its tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.environments.base import PromptedTask


@dataclass(frozen=True)
class StdioTest:
    """A program reads ``stdin`` and must write ``expected``."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A call of a function, or of a method of the class ``Solution``, must return one of the ``accepted`` values (of JSON)."""

    function: str
    arguments: tuple[Any, ...]
    accepted: tuple[Any, ...]


@dataclass(frozen=True)
class AssertTest:
    """Python statements that assert something of the program."""

    source: str


Test = StdioTest | CallTest | AssertTest


@dataclass(frozen=True, kw_only=True)
class CodeProblem:
    """A problem, in the form that every kind of row is read into."""

    question: str
    tests: tuple[Test, ...]  # all of one kind
    starter: str = ""  # code that the program begins with, or that names its function
    prefix: str = ""  # Python that a reply may rely on: it runs before the reply's program
    setup: tuple[str, ...] = ()  # Python that the tests of an AssertTest rely on
    shown: tuple[str, ...] = ()  # assertions that a prompt may show; empty: those of its tests
    entry_point: str = ""  # the function that the tests call; empty: every name that they do not define


@dataclass(frozen=True, kw_only=True)
class CodeTask(PromptedTask):
    problem: CodeProblem

"""Runs assertions over a program that it does not contain. Runs in the sandbox, in a process that no program of a policy ever was in.

A name that the tests do not define stands for the policy's: calling it records the call, and gives the answer that the policy's program
gave to it in a separate process (``candidate``). Where there is no answer yet, the statement is left, and the next one goes on. So one
pass finds most calls, and the pass in which every call has its answer is the verdict.

Reads a request from standard input: ``setup`` and ``tests`` (sources), ``remote`` names, ``answers`` by call. Writes one JSON object.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import io
import json
import math
import random
import sys
import typing
from collections import Counter
from types import ModuleType
from typing import Any

from strop.extensions.code.programs.plain_values import MalformedValue, NotPlain, decode_value, encode_value


class PlainArray:
    """The type of arrays, of which there are none: values are plain."""


def is_close(first: Any, second: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    if equal_nan and first != first and second != second:
        return True
    if math.inf in (abs(first), abs(second)):
        return bool(first == second)
    return bool(abs(first - second) <= atol + rtol * abs(second))


def all_close(first: Any, second: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Compare numbers, or lists of them of one shape; a number and a list: it with each."""
    for value in (first, second):
        if not isinstance(value, list | tuple | int | float | complex):
            raise TypeError(f"{type(value).__name__} {value!r:.80} is no number")
    if not isinstance(first, list | tuple):
        if not isinstance(second, list | tuple):
            return is_close(first, second, rtol, atol, equal_nan)
        first = [first] * len(second)
    if not isinstance(second, list | tuple):
        second = [second] * len(first)
    if len(first) != len(second):
        raise ValueError(f"the lengths {len(first)} and {len(second)} differ")
    return all(all_close(one, other, rtol, atol, equal_nan) for one, other in zip(first, second, strict=True))


def assert_all_close(
    actual: Any, desired: Any, rtol: float = 1e-07, atol: float = 0, equal_nan: bool = True, **more: Any
) -> None:
    assert all_close(actual, desired, rtol, atol, equal_nan), f"{actual!r:.100} is not close to {desired!r:.100}"


def offer_numpy() -> None:
    """Let ``import numpy`` find these functions where there is no NumPy."""
    try:
        importlib.import_module("numpy")
    except ImportError:
        module, testing = ModuleType("numpy"), ModuleType("numpy.testing")
        for name, value in {
            "ndarray": PlainArray,
            "float64": float,
            "float32": float,
            "inf": math.inf,
            "nan": math.nan,
            "isclose": is_close,
            "allclose": all_close,
            "testing": testing,
        }.items():
            setattr(module, name, value)
        testing.assert_allclose = assert_all_close  # type: ignore[attr-defined]
        sys.modules["numpy"], sys.modules["numpy.testing"] = module, testing


MODULES = (  # that tests use without importing them
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "typing",
)
ENDS_ITERATION = (StopIteration, StopAsyncIteration)  # in a test's all(map(...)) they would end it, as if all were well
MESSAGES = 3  # of failures that are reported


class Unanswered(BaseException):
    """A call whose answer is not known yet."""


class CandidateError(Exception):
    """An exception of the policy's program that is of no built-in kind."""


class Remote:
    """Something in the policy's process: equal to nothing but itself, neither true nor false, of no type that tests know."""

    __slots__ = ("_session", "_target")

    def __init__(self, session: CheckSession, target: str) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_target", target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {
            "args": [encode_argument(each) for each in args],
            "kwargs": {key: encode_argument(kwargs[key]) for key in kwargs},
        }
        return self._session.perform({"kind": "call", "target": self._target, **given})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._session.perform({"kind": "get", "target": self._target, "name": name})

    def __setattr__(self, name: str, value: Any) -> None:
        self._session.perform({"kind": "set", "target": self._target, "name": name, "value": encode_argument(value)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._target == self._target

    def __hash__(self) -> int:
        return hash(self._target)

    def __bool__(self) -> bool:
        raise TypeError("the program returned an object of one of its classes, which is not plain data")


def encode_argument(value: Any) -> Any:
    def refer(inner: Any) -> Any:
        if isinstance(inner, Remote) and inner._target.startswith("@"):
            return {"reference": inner._target[1:]}
        raise NotPlain(f"a test hands {type(inner).__name__} {inner!r:.80} to the program, which is not plain data")

    return encode_value(value, refer)


class CheckSession:
    """One pass over the tests."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers  # lines that the policy's process wrote
        self.calls: list[dict[str, Any]] = []
        self.seen: Counter[str] = Counter()
        self.waiting = False
        self.passed = self.failed = 0
        self.messages: list[str] = []
        self.ungradable = ""

    def perform(self, call: dict[str, Any]) -> Any:
        text = json.dumps(call, sort_keys=True)
        name = hashlib.sha256(f"{self.seen[text]} {text}".encode()).hexdigest()[:16]
        self.seen[text] += 1
        self.calls.append({"id": name, **call})
        if name not in self.answers:
            self.waiting = True
            raise Unanswered
        return self.read_answer(self.answers[name])

    def read_answer(self, line: str) -> Any:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict) and "value" in answer:
            return decode_value(answer["value"], lambda name: Remote(self, f"@{name}"))
        kind, text = "TimeoutError", "no answer within the limits"
        if isinstance(answer, dict) and isinstance(given := answer.get("raised"), list) and len(given) == 2:
            kind, text = str(given[0]), str(given[1])
        known = getattr(builtins, kind, None)
        if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, ENDS_ITERATION):
            raise build_exception(known, text)
        raise CandidateError(f"{kind}: {text}")

    def count_passed(self) -> None:
        self.passed += 1

    def count_failed(self, line: str, error: BaseException) -> None:
        if isinstance(error, NotPlain):
            self.ungradable = str(error)
        if isinstance(error, Unanswered):
            return
        self.failed += 1
        if len(self.messages) < MESSAGES:
            self.messages.append(f"{line}: {type(error).__name__} {error}"[:500])


def build_exception(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # a kind that wants more arguments, such as UnicodeDecodeError
        return CandidateError(f"{kind.__name__}: {text}")


class GuardStatements(ast.NodeTransformer):
    """Puts each statement of the tests into a ``try``, so that the next one runs whatever becomes of it, and counts assertions: also a
    call of one of the tests' own ``helpers`` that assert something."""

    def __init__(self, helpers: set[str]) -> None:
        self.helpers = helpers

    def is_counted(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Assert):
            return not isinstance(statement.test, ast.Constant)
        call = statement.value if isinstance(statement, ast.Expr) else None
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.helpers

    def guard(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return [self.guard_one(statement) for statement in statements]

    def guard_one(self, statement: ast.stmt) -> ast.stmt:
        if isinstance(statement, ast.FunctionDef):
            if is_guarded(statement):
                statement.body = self.guard(statement.body)
            return statement
        if isinstance(statement, ast.For | ast.If | ast.With):
            statement.body = self.guard(statement.body)
            if not isinstance(statement, ast.With):
                statement.orelse = self.guard(statement.orelse)
        if isinstance(statement, ast.ClassDef | ast.Import | ast.ImportFrom | ast.Global | ast.Pass | ast.Break | ast.Continue):
            return statement
        guarded = ast.parse(
            f"try: pass\nexcept BaseException as __error: __failed({ast.unparse(statement)[:100]!r}, __error)\n"
            + ("else: __passed()\n" if self.is_counted(statement) else "")
        ).body[0]
        assert isinstance(guarded, ast.Try)
        guarded.body = [statement]
        return guarded


def is_guarded(function: ast.FunctionDef) -> bool:
    """Whether each statement of a function counts by itself."""
    return function.name == "check" or function.name.startswith("test")


def list_helpers(trees: list[ast.Module]) -> set[str]:
    """The functions of the tests that assert something, so that a call of one is a test."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        each.name for each in functions if not is_guarded(each) and any(isinstance(node, ast.Assert) for node in ast.walk(each))
    }


def list_free_names(trees: list[ast.Module]) -> set[str]:
    """The names that sources read and nowhere define."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imported = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imported}
    return read - bound - set(dir(builtins)) - {"__name__"}


def keep_trusted(tree: ast.Module, remote: set[str]) -> ast.Module:
    """Leave out of the setup what is the policy's. Classes are, since their instances are handed to its functions."""
    remote |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in remote]
    return tree


def run_checks(request: dict[str, Any]) -> dict[str, Any]:
    session, remote = CheckSession(request["answers"]), set(request["remote"])
    setup = [keep_trusted(ast.parse(source), remote) for source in request["setup"]]
    tests = [ast.parse(source) for source in request["tests"]]
    free = list_free_names([*setup, *tests])
    namespace: dict[str, Any] = {"__name__": "tests", "__failed": session.count_failed, "__passed": session.count_passed}
    namespace |= {name: getattr(typing, name) for name in typing.__all__ if name in free}
    namespace |= {name: importlib.import_module(name) for name in MODULES if name in free}
    namespace |= {name: Remote(session, name) for name in (free - set(namespace)) | remote}
    offer_numpy()
    random.seed(0)
    guard = GuardStatements(list_helpers([*setup, *tests]))
    for tree in [*setup, *tests]:
        tree.body = guard.guard(tree.body)
        exec(compile(ast.fix_missing_locations(tree), "tests.py", "exec"), namespace)
    return {
        "calls": session.calls,
        "waiting": session.waiting,
        "passed": session.passed,
        "failed": session.failed,
        "messages": session.messages,
        "ungradable": session.ungradable,
    }


def main() -> None:
    request = json.loads(sys.stdin.read())
    result, sys.stdout = sys.stdout, io.StringIO()  # what tests print is no verdict
    try:
        verdict = run_checks(request)
    except (SyntaxError, MalformedValue) as error:
        verdict = {"ungradable": f"{type(error).__name__}: {error}"}
    result.write(json.dumps(verdict) + "\n")
    result.flush()

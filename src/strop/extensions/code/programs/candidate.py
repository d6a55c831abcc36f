"""Calls functions of a program that a policy wrote. Runs in the sandbox, with that program, and knows no expected result.

Reads a request from standard input: ``sources`` to run, ``calls`` to make, ``timeout_s`` of processor time for each. Writes a line of JSON
when the sources have run, and one for each call, as it ends. The policy's program may write such lines itself: they are what it says its
results are, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from typing import Any

from strop.extensions.code.programs.plain_values import NotPlain, decode_value, encode_value


class CallTimedOut(BaseException):
    """A call used its processor time up."""


class Candidate:
    """The program of a policy, as a module, with what its calls returned."""

    def __init__(self) -> None:
        self.module = types.ModuleType("solution")
        self.results: dict[str, Any] = {}
        sys.modules["solution"] = self.module

    def load(self, sources: list[str]) -> dict[str, Any]:
        try:
            for source in sources:
                exec(compile(source, "solution.py", "exec"), self.module.__dict__)
        except BaseException as error:
            kind = "SyntaxError" if isinstance(error, SyntaxError) else type(error).__name__
            return {"raised": [kind, describe(error)]}
        return {"value": None}

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            value = self.perform(call)
            self.results[call["id"]] = value
            return {"value": encode_value(value, lambda inner: self.refer(call["id"], inner))}
        except CallTimedOut:
            return {"timeout": True}
        except BaseException as error:
            return {"raised": [type(error).__name__, describe(error)]}

    def perform(self, call: dict[str, Any]) -> Any:
        target = self.find(call["target"])
        if call["kind"] == "get":
            return getattr(target, call["name"])
        if call["kind"] == "set":
            return setattr(target, call["name"], decode_value(call["value"], self.results.__getitem__))
        positional = [decode_value(each, self.results.__getitem__) for each in call["args"]]
        return target(
            *positional, **{name: decode_value(each, self.results.__getitem__) for name, each in call["kwargs"].items()}
        )

    def find(self, target: str) -> Any:
        """The result of a call ("@ID"), a name of the program, or a method of its class Solution."""
        if target.startswith("@"):
            return self.results[target[1:]]
        if not hasattr(self.module, target) and hasattr(self.module, "Solution"):
            return getattr(self.module.Solution(), target)
        if not hasattr(self.module, target):
            raise NameError(f"the program defines no {target!r}")
        return getattr(self.module, target)

    def refer(self, name: str, value: Any) -> Any:
        if value is not self.results[name]:
            raise NotPlain(f"a {type(value).__name__} inside the result")
        return {"reference": name}


def describe(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:
        return ""


def stop_call(*_: Any) -> None:
    raise CallTimedOut


def main() -> None:
    request = json.loads(sys.stdin.read())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the program prints is no answer
    os.dup2(1, 2)
    signal.signal(signal.SIGPROF, stop_call)

    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    candidate = Candidate()
    write(loaded := candidate.load(request["sources"]))
    for call in request["calls"] if "value" in loaded else ():
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        answer = candidate.answer(call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(answer)
        if "timeout" in answer:
            break  # its threads may still run, and the time of the next call would be theirs
    os._exit(0)

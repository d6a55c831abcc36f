"""A process that scores answers under limits, started by ``workers.py``. It imports the scorers and next to nothing else.

Math-verify and some of reasoning-gym's scorers hand what the model wrote to SymPy, which may compute for ever, fill the
memory, or run it: SymPy's parsers call ``eval``. So every answer is scored in a fork that may only compute (``seccomp.py``),
for so long and in so much memory, and that the kernel ends even inside C code, where no Python signal handler runs. A fork
also means that no verdict depends on what was scored before.

Protocol: a length and a pickle in, from the parent, which is trusted; one JSON line out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from strop.environments.seccomp import confine

MEMORY = 4 << 30  # bytes of address space
WALL = 20  # times the limit on processor time, on a busy machine or for an answer that sleeps
LARGEST_REPLY = 4096

# Judged once before any fork, so that the parser's tables and SymPy's lazy imports are there in every fork.
WARM_UP = (
    ("\\frac{1}{2}", "0.51"),
    ("2x", "x+x+1"),
    ("x^2", "\\sqrt{x}\\sin(x)"),
    ("(1,2]", "[1,3)"),
    ("\\{1,2\\}", "1,2,3"),
    ("x<3", "x>3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
    ("\\text{even}", "\\text{odd}"),
    ("50\\%", "12 \\text{ cm}"),
    ("2\\pi", "6.28^{\\circ}"),
)

Reply = dict[str, Any]


class Refused(Exception):
    """No answer can be judged, because the reference cannot be read."""


def math_verify_judge() -> Callable[..., Callable[[], float]]:
    from math_verify import parse, verify  # type: ignore[import-untyped,unused-ignore]

    def prepare(reference: str, answer: str) -> Callable[[], float]:
        def judge() -> float:
            gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None)  # None: the limits are this process's
            if not gold:
                raise Refused(f"the reference answer {reference!r} cannot be parsed")
            return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

        return judge

    for reference, answer in WARM_UP:
        prepare(reference, f"\\boxed{{{answer}}}")()
    return prepare


def reasoning_gym_judge() -> Callable[..., Callable[[], float]]:
    import reasoning_gym  # type: ignore[import-untyped,unused-ignore]

    @lru_cache(maxsize=64)
    def dataset(task: str, options: str) -> Any:
        return reasoning_gym.create_dataset(task, **json.loads(options), seed=0, size=1)

    def prepare(task: str, options: str, answer: str, entry: Reply) -> Callable[[], float]:
        scorer = dataset(task, options)  # before the fork, so that it is made once
        return lambda: float(scorer.score_answer(answer, entry))

    return prepare


JUDGES = {"math_verify": math_verify_judge, "reasoning_gym": reasoning_gym_judge}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not look like a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends when its input does
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prepared: dict[str, Callable[..., Callable[[], float]]] = {}
    while header := sys.stdin.buffer.read(8):
        kind, cpu_s, arguments = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", header)[0]))
        try:
            if kind not in prepared:
                prepared[kind] = JUDGES[kind]()
            judge = prepared[kind](**arguments)
        except Exception as error:
            reply: Reply = {"broken": f"{type(error).__name__}: {error}"}
        else:
            reply = run(judge, cpu_s)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def run(judge: Callable[[], float], cpu_s: float) -> Reply:
    """Judge in a fork under limits, and wait for it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _child(judge, cpu_s, sending)
    os.close(sending)
    text = _read(receiving, time.monotonic() + WALL * cpu_s)
    os.close(receiving)
    os.kill(child, signal.SIGKILL)  # it is done, or past every limit; a zombie takes no notice
    _, status = os.waitpid(child, 0)
    if text.endswith(b"\n"):
        with contextlib.suppress(ValueError):
            reply = json.loads(text)
            if isinstance(reply, dict):
                return reply
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended in (signal.SIGPROF, signal.SIGKILL):
        return {"failure": f"ran past the limit of {cpu_s:g} s"}
    return {"failure": f"brought the scorer down (signal {ended})"}


def _child(judge: Callable[[], float], cpu_s: float, sending: int) -> NoReturn:
    reply: Reply
    try:
        os.dup2(sending, 0)
        os.closerange(1, 1 << 16)  # its pipe is all it can write to
        with contextlib.suppress(ValueError):  # macOS knows no limit on address space
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        # Processor time decides, so that a busy machine does not turn a right answer into a timeout.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        warning = None
        try:
            confine()
        except OSError as error:
            warning = str(error)
        try:
            reply = {"value": judge(), "unconfined": warning}
        except Refused as error:
            reply = {"refused": str(error)}
        except Exception as error:  # MemoryError and RecursionError among them: the answer cannot be judged
            reply = {"failure": f"{type(error).__name__}: {error}"[:200]}
        os.write(0, json.dumps(reply).encode() + b"\n")
    finally:
        os._exit(0)


def _read(pipe: int, deadline: float) -> bytes:
    """What comes through the pipe until it is closed, ends a line, or the deadline passes."""
    text = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(text) < LARGEST_REPLY and not text.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return b""
        if not (part := os.read(pipe, LARGEST_REPLY)):
            break
        text += part
    return text


if __name__ == "__main__":
    main()

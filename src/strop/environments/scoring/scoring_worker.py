"""A process that scores answers under resource limits, started by ``scoring_pool.py``. It imports little besides the scorers.

Math-verify and other scorers pass model output to SymPy, which may run forever, exhaust memory, or execute it: SymPy's parsers call
``eval``. So every answer is scored in a forked child that can only compute (``seccomp.py``) under limits on
time and memory. The kernel kills the child even inside C code, where no Python signal handler runs. Forking also makes each
score independent of earlier ones.

Protocol: input is a length and a pickle from the trusted parent process; output is one JSON line.
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
from importlib import import_module
from typing import Any, NoReturn

from strop.safety.confinement import confine

MEMORY_LIMIT = 4 << 30  # bytes of address space
WALL_CLOCK_FACTOR = 20  # wall-clock limit as a multiple of the CPU limit: for busy machines and for answers that sleep
MAX_REPLY_BYTES = 4096

Reply = dict[str, Any]


class UnparsableReference(Exception):
    """The reference answer cannot be parsed, so no answer can be scored against it."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library's output must not be mistaken for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process exits when its input is closed
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prepared: dict[str, Callable[..., Callable[[], float]]] = {}
    while header := sys.stdin.buffer.read(8):
        kind, loader, cpu_s, arguments = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", header)[0]))
        try:
            if kind not in prepared:
                prepared[kind] = _import_loader(loader)()
            score = prepared[kind](**arguments)
        except Exception as error:
            reply: Reply = {"broken": f"{type(error).__name__}: {error}"}
        else:
            reply = score_in_fork(score, cpu_s)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _import_loader(path: str) -> Callable[[], Callable[..., Callable[[], float]]]:
    module, _, name = path.partition(":")
    loader: Callable[[], Callable[..., Callable[[], float]]] = getattr(import_module(module), name)
    return loader


def score_in_fork(score: Callable[[], float], cpu_s: float) -> Reply:
    """Call ``score`` in a forked child under limits and return its reply."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(score, cpu_s, sending)
    os.close(sending)
    text = _read_reply(receiving, time.monotonic() + WALL_CLOCK_FACTOR * cpu_s)
    os.close(receiving)
    os.kill(child, signal.SIGKILL)  # it has finished or exceeded a limit; a zombie ignores the signal
    _, status = os.waitpid(child, 0)
    if text.endswith(b"\n"):
        with contextlib.suppress(ValueError):
            reply = json.loads(text)
            if isinstance(reply, dict):
                return reply
    if text:
        return {"failure": "the scorer's reply was too long or broken"}
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if signal_number in (signal.SIGPROF, signal.SIGKILL):
        return {"failure": f"ran past the limit of {cpu_s:g} s"}
    return {"failure": f"crashed the scorer (signal {signal_number})"}


def _run_child(score: Callable[[], float], cpu_s: float, write_end: int) -> NoReturn:
    reply: Reply
    try:
        os.dup2(write_end, 0)
        os.closerange(1, 1 << 16)  # it can write only to its pipe
        with contextlib.suppress(ValueError):  # macOS does not support this limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        # Limit CPU time, so that a busy machine does not turn a correct answer into a timeout.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        warning = None
        try:
            confine()
        except OSError as error:
            warning = str(error)
        try:
            reply = {"value": score(), "unconfined": warning}
        except UnparsableReference as error:
            reply = {"refused": str(error)[:1000]}
        except Exception as error:  # includes MemoryError and RecursionError: the answer cannot be scored
            reply = {"failure": f"{type(error).__name__}: {error}"[:200]}
        os.write(0, json.dumps(reply).encode() + b"\n")
    finally:
        os._exit(0)


def _read_reply(pipe: int, deadline: float) -> bytes:
    """Read from the pipe until it is closed or a line ends. Returns b"" when the deadline passes."""
    text = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(text) < MAX_REPLY_BYTES and not text.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return b""
        if not (part := os.read(pipe, MAX_REPLY_BYTES)):
            break
        text += part
    return text


if __name__ == "__main__":
    # As the module that scorers import: the exceptions that they raise are its own.
    import_module("strop.environments.scoring.scoring_worker").main()

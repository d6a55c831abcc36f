"""Tokenizes recorded conversations alongside the training loop: in worker processes, or in a thread of this process.

A thread does it until the first worker is ready, and wherever no worker can start. The tokens are the same.

A worker is ``python -m strop.extensions.recorded.tokenizing_pool``. It reads messages from its standard input, each a pickle after its
length: first (chat template, rules), answered with "ready", then one message per group of conversations, answered with their tokens. It
exits when its input is closed, so it does not outlive the run.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from queue import Empty, LifoQueue
from threading import Lock, Thread
from typing import IO, Any

from strop.extensions.recorded.recorded_tokens import RecordedConversation, RecordedRules, TokenizedConversation, tokenize_group
from strop.models.chat_template import ChatTemplate

log = logging.getLogger(__name__)

READY = "ready"
LENGTH = struct.Struct("<Q")


def write_message(pipe: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Any:
    """Return the next message. Raises EOFError if the other side is gone."""
    header = pipe.read(LENGTH.size)
    data = pipe.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""
    if not data:
        raise EOFError
    return pickle.loads(data)


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until either pipe is closed, as by a run that was killed."""
    with suppress(EOFError, BrokenPipeError):
        try:
            template, rules = read_message(requests)
        except EOFError:
            return
        except Exception as error:  # the tokenizer's class may not be importable here
            return write_message(replies, f"{type(error).__name__}: {error}")
        write_message(replies, READY)
        while True:
            write_message(replies, tokenize_group(read_message(requests), template, rules))


Tokenized = list[TokenizedConversation] | str
CORES_PER_WORKER, MOST_WORKERS = 8, 4  # by default


class TokenizingWorkerDied(RuntimeError):
    """A worker died twice on the same conversations."""


def choose_num_workers(configured: int | None) -> int:
    return min((os.cpu_count() or 1) // CORES_PER_WORKER, MOST_WORKERS) if configured is None else configured


class TokenizingPool:
    """``tokenize`` may be called by as many threads as there are workers."""

    def __init__(self, template: ChatTemplate, rules: RecordedRules, num_workers: int) -> None:
        self._template, self._rules = deepcopy(template), rules  # a tokenizer must not be shared by two threads
        self._template_lock, self._lock = Lock(), Lock()
        self._idle: LifoQueue[subprocess.Popen[bytes]] = LifoQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._starting = [Thread(target=self._start, daemon=True) for _ in range(num_workers)]
        for thread in self._starting:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """The processes of the pool."""
        with self._lock:
            return [process.pid for process in self._processes]

    def wait_until_ready(self) -> None:
        for thread in self._starting:
            thread.join()

    def tokenize(self, conversations: Sequence[RecordedConversation]) -> Tokenized:
        """Return the tokens of a group's conversations, or why there are none. Raises TokenizingWorkerDied."""
        try:
            worker = self._idle.get_nowait()
        except Empty:
            with self._template_lock:
                return tokenize_group(conversations, self._template, self._rules)
        for attempt in (1, 2):
            try:
                assert worker.stdin is not None and worker.stdout is not None
                write_message(worker.stdin, conversations)
                reply: Tokenized = read_message(worker.stdout)
                self._idle.put(worker)
                return reply
            except (EOFError, OSError) as error:
                status = self._end(worker)
                log.warning("the process %d that tokenizes ended with exit status %d; another one is started", worker.pid, status)
                if attempt == 2 or self._closed:
                    self._restart()
                    raise TokenizingWorkerDied(
                        f"the process {worker.pid} that tokenizes ended with exit status {status}, as the one before it did on the same "
                        "example; it may have used too much memory. data.num_workers=0 tokenizes in the process of the run"
                    ) from error
                if (another := self._open()) is None:
                    with self._template_lock:
                        return tokenize_group(conversations, self._template, self._rules)
                worker = another
        raise AssertionError("the second attempt returns or raises")

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._closed = True
        for thread in self._starting:
            thread.join()
        for process in list(self._processes):
            self._end(process)

    def _restart(self) -> None:
        thread = Thread(target=self._start, daemon=True)
        self._starting.append(thread)
        thread.start()

    def _start(self) -> None:
        if (worker := self._open()) is not None:
            self._idle.put(worker)

    def _open(self) -> subprocess.Popen[bytes] | None:
        """Start a worker. None, with a warning, if it cannot tokenize."""
        try:
            with self._lock:
                if self._closed:
                    return None
                worker = _start_worker()
                self._processes.append(worker)
            assert worker.stdin is not None and worker.stdout is not None
            write_message(worker.stdin, (self._template, self._rules))
            answer = read_message(worker.stdout)
        except Exception as error:  # the tokenizer may be of a class that cannot be sent
            answer = f"{type(error).__name__}: {error}"
        if answer == READY:
            return worker
        if not self._closed:
            log.warning(
                "examples are tokenized by a thread, which shares a processor with the run: no worker could start (%s)", answer
            )
        return None

    def _end(self, worker: subprocess.Popen[bytes]) -> int:
        """Close a worker's input, so that it ends, and return its exit status."""
        for pipe in (worker.stdin, worker.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            return worker.wait(10)
        except subprocess.TimeoutExpired:
            worker.kill()
            return worker.wait()
        finally:
            with self._lock, suppress(ValueError):
                self._processes.remove(worker)


def _start_worker() -> subprocess.Popen[bytes]:
    """Start a process that loads only the tokenizer's library and inherits no thread or device from this one."""
    path = os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[2]), *filter(None, sys.path)]))  # and remote code's folder
    settings = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "strop.extensions.recorded.tokenizing_pool"]
    return subprocess.Popen(  # in its own session: Ctrl-C is for the run, which ends its workers
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **settings}, start_new_session=True
    )


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    serve(sys.stdin.buffer, answers)
    os._exit(0)

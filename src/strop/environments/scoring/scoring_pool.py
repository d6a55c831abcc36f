"""A small pool of ``scoring_worker.py`` processes that score under resource limits, usable from any thread and event loop.

    call() -> a thread of the pool -> an idle worker, or a new one -> a forked child that scores -> its reply

Workers start on demand, in bubblewrap where the machine has it: without network, and without files but the libraries. They exit
with this process, even if it is killed, because their input is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import math
import os
import pickle
import struct
import subprocess
import sys
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from strop.endings import Ending
from strop.safety.confinement import isolate_command

MAX_CACHED_RESULTS = 8192  # cached results: samples of a group often agree, and several rewards score the same answer


class ScoringError(RuntimeError):
    """Scoring fails for every answer: a library is missing, or the reference cannot be parsed."""

    ending = Ending.GRADER


class UnscorableTask(ScoringError):
    """The reference of a task cannot be parsed."""

    ending = Ending.BROKEN_TASK


@dataclass(frozen=True)
class ScoringResult:
    """The score of an answer, or the reason why it has none: scoring exceeded the limit or crashed."""

    value: float | None
    failure: str | None = None


def get_scoring_pool(size: int, *, isolated: bool = True) -> ScoringPool:
    """Return this process's pool of at most ``size`` workers. A forked process gets its own pool.

    Unless ``isolated``, workers can read this machine's files, where scorers look for tasks and data; in either case, the scoring
    code itself can only compute and read, within its limits.
    """
    return _scoring_pool(os.getpid(), size, isolated)


@lru_cache(maxsize=8)
def _scoring_pool(process: int, size: int, isolated: bool) -> ScoringPool:
    return ScoringPool(size, isolated)


class ScoringPool:
    def __init__(self, size: int, isolated: bool = True) -> None:
        self._isolated = isolated
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="scoring")
        self._idle_workers: LifoQueue[subprocess.Popen[bytes]] = LifoQueue()
        self._cache: OrderedDict[bytes, ScoringResult] = OrderedDict()
        atexit.register(self.close)

    async def call(self, kind: str, cpu_s: float, *, loader: str, **arguments: Any) -> ScoringResult:
        """Score within ``cpu_s`` seconds of CPU time. Raises ScoringError if no answer can be scored.

        ``kind``: the name of the scorer in messages. ``loader`` (``module:function``) is called once by a worker: it returns a function of
        the ``arguments``, which returns one that scores."""
        request = pickle.dumps((kind, loader, cpu_s, arguments))
        key = hashlib.sha256(request).digest()  # an answer may be long
        result = self._cache.get(key)
        if result is None:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, kind, request)
            self._cache[key] = result
            if len(self._cache) > MAX_CACHED_RESULTS:
                self._cache.popitem(last=False)
        return result

    def close(self) -> None:
        """Stop the workers after their running requests; each is bounded by its limit."""
        self._threads.shutdown(cancel_futures=True)
        with suppress(Empty):
            while True:
                _stop_worker(self._idle_workers.get_nowait())

    def _score(self, kind: str, request: bytes) -> ScoringResult:
        reply, status = self._request(request)
        if reply is None:  # killed from outside, because no answer can do this; retry with a new worker
            reply, status = self._request(request)
        if reply is None:
            raise ScoringError(f"{kind}: its worker died twice, the last time with exit status {status}")
        if "broken" in reply:
            raise ScoringError(f"{kind} cannot be used here: {reply['broken']}")
        if "refused" in reply:
            raise UnscorableTask(f"{kind}: {reply['refused']}")
        if reply.get("unconfined"):
            warnings.warn(f"answers are scored with limits on time and memory only: {reply['unconfined']}", stacklevel=2)
        value = reply.get("value")
        if isinstance(value, float) and math.isfinite(value):
            return ScoringResult(value)
        return ScoringResult(None, str(reply.get("failure", f"the score was {value!r:.80}")))

    def _request(self, request: bytes) -> tuple[dict[str, Any] | None, int | None]:
        """Send a request to a worker. Returns (reply, None), or (None, exit status) if the worker died."""
        try:
            worker = self._idle_workers.get_nowait()
        except Empty:
            worker = _start_worker(self._isolated)
        assert worker.stdin is not None and worker.stdout is not None
        reply = b""
        with suppress(BrokenPipeError):
            worker.stdin.write(struct.pack("<Q", len(request)) + request)
            worker.stdin.flush()
            reply = worker.stdout.readline()
        if not reply.endswith(b"\n"):
            return None, _stop_worker(worker)
        self._idle_workers.put(worker)
        return json.loads(reply), None


def _start_worker(isolated: bool) -> subprocess.Popen[bytes]:
    # A fixed hash seed makes SymPy's orderings, and hence the scores, the same in every worker. -P keeps the current
    # folder off the module path; PYTHONPATH points to the package that this process imported.
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "strop.environments.scoring.scoring_worker"]
    if not isolated:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **settings})
    command = isolate_command(command, _find_libraries(path.split(os.pathsep)))
    inherited = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_", "LC_", "LANG", "PATH"))}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**inherited, **settings})


def _find_libraries(search_path: list[str]) -> list[str]:
    """Return the folders that an isolated worker reads, each by Python's path and by the resolved path."""
    packages = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    folders = [Path(folder).absolute() for folder in (sys.prefix, *search_path, *packages)]
    # A folder with arbitrary content is not exposed, only the package that may have been put there.
    folders = [folder / "strop" if str(folder) in ("/", "/tmp") else folder for folder in folders]
    names = [str(name) for folder in folders if folder.is_dir() for name in (folder, folder.resolve())]
    return list(dict.fromkeys(names))


def _stop_worker(worker: subprocess.Popen[bytes]) -> int:
    """Close the worker's input, so that it exits, and wait for it. Returns its exit status, negative for a signal."""
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    return worker.wait()

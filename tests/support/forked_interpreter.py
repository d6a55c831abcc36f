"""An interpreter whose processes are forks, for what a run starts by ``sys.executable`` itself: Ray's workers, and those that tokenize.

``sys.executable`` is then a small program, ``forked_client``. It hands its arguments, environment, folder and standard files on to a
server, a fork of the one of ``support.forks``, which has imported what such processes need, and lives as long as its fork: whoever
looks for the environment of the process finds it there, and whoever kills the one kills the other.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import process as own_process
from pathlib import Path
from typing import Any

from support.forks import forks

CLIENT = Path(__file__).with_name("forked_client.py")
LENGTH = 8  # bytes before each request


@dataclass(frozen=True)
class Forked:
    """For ``before``: the processes that a run starts are forks. It goes on with ``then``."""

    interpreter: str
    then: Callable[[], None] | None = None

    def __call__(self) -> None:
        sys.executable = self.interpreter
        if self.then is not None:
            self.then()


@contextmanager
def forked_interpreter() -> Iterator[str]:
    """Yield the path of such an interpreter, whose server ends with the context."""
    with tempfile.TemporaryDirectory(prefix="strop-python-", dir="/tmp") as folder:  # a socket wants a short path
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/socket")
        listener.listen(64)
        program = Path(folder, "python")
        program.write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
        program.chmod(0o700)
        server = forks().Process(target=serve, args=(listener,), daemon=True)
        server.start()
        listener.close()
        try:
            yield str(program)
        finally:
            server.kill()
            server.join()


# --- in the server --------------------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> None:
    """Fork for each client. Tell it the exit status of its fork, which is killed when the client has gone."""
    clients: dict[int, tuple[socket.socket, int]] = {}  # process -> its client, and the descriptor that says when it has ended
    while True:
        owners = {end: process for process, (client, end) in clients.items()}
        callers = {client: process for process, (client, _) in clients.items()}
        ready, _, _ = select.select([listener, *owners, *callers], [], [])
        for each in ready:
            if each is listener:
                accept(listener, clients)
            elif each in owners:
                _forget(clients, owners[each])
            elif callers[each] in clients:  # and did not end at the same time
                os.kill(callers[each], signal.SIGKILL)
                _forget(clients, callers[each])


def _forget(clients: dict[int, tuple[socket.socket, int]], process: int) -> None:
    client, end = clients.pop(process)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    client.close()
    os.close(end)


def accept(listener: socket.socket, clients: dict[int, tuple[socket.socket, int]]) -> None:
    client, _ = listener.accept()
    try:
        start, files, _, _ = socket.recv_fds(client, LENGTH, 3)
        size = int.from_bytes(start, "little")
        data = b""
        while len(data) < size:
            data += client.recv(size - len(data)) or _raise_gone()
    except OSError:
        client.close()
        return
    process = os.fork()
    if process == 0:
        others = [listener.fileno(), client.fileno()]
        others += [number for each, end in clients.values() for number in (each.fileno(), end)]
        run_and_exit(json.loads(data), files, others)
    for file in files:
        os.close(file)
    clients[process] = (client, os.pidfd_open(process))


def _raise_gone() -> bytes:
    raise ConnectionError("the client has gone")


# --- in the forks ---------------------------------------------------------------------------------------------------------------------


def run_and_exit(request: dict[str, Any], files: Sequence[int], others: Sequence[int]) -> None:
    code: Any = 1
    try:
        _become(request, files, others)
        _run(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(request: dict[str, Any], files: Sequence[int], others: Sequence[int]) -> None:
    """Have the files, the environment and the folder of the client, and nothing of the server."""
    for number in others:
        os.close(number)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    given = {str(Path(entry)) for entry in before.split(os.pathsep) if entry}
    rest = [entry for entry in sys.path if entry and str(Path(entry)) not in given]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *rest]
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    own_process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _run(arguments: Sequence[str]) -> None:
    """Run ``[-P] -m MODULE ...``, ``-c CODE ...`` or a script with its arguments."""
    if "-m" in arguments[:2]:
        sys.argv = list(arguments[arguments.index("-m") + 1 :])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
        return
    script, *rest = arguments
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).parent))
    os.execvp = _stay  # type: ignore[assignment]
    runpy.run_path(script, run_name="__main__")


def _stay(program: str, args: Sequence[str]) -> None:
    """Instead of ``bash -c "exec python SCRIPT ..."``, by which Ray goes from the script that sets up a worker to the worker."""
    command = shlex.split(args[-1])
    if command[:2] != ["exec", sys.executable]:
        os.execv(f"/bin/{program}", list(args))
    _run(command[2:])
    raise SystemExit

"""A Python process that keeps its variables: ``python3 kernel.py SOCKET < code`` runs code in it, and starts it if it is not there."""

import ast
import os
import pprint
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from typing import Any

MOST = 1 << 20  # bytes of an answer


def run_cell(code: str, namespace: "dict[str, Any]") -> bytes:
    """Run code as a notebook does. Return what it and its programs print, and the value of the last expression."""
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            tree = ast.parse(code, "<cell>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
                if value is not None:
                    pprint.pprint(value)
        except BaseException:
            sys.stdout.flush()
            kind, error, frames = sys.exc_info()
            traceback.print_exception(kind, error, frames.tb_next if frames else None)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, old in zip((1, 2), saved):  # noqa: B905 (no strict before Python 3.10)
            os.dup2(old, stream)
            os.close(old)
        file.seek(0)
        return file.read(MOST)


def serve(path: str) -> None:
    """Run cells, one after another, until this process is killed."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(8)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    while True:
        connection, _ = server.accept()
        with suppress(OSError), connection, connection.makefile("rb") as stream:  # a client may have ended
            connection.sendall(run_cell(stream.read().decode("utf-8", "replace"), namespace) + b"\0")


def start(path: str) -> None:
    """Start the process in a new session, so that it outlives this one."""
    if os.path.exists(path):
        os.remove(path)
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        with open(path + ".pid", "w") as file:
            file.write(str(os.getpid()))
        serve(path)


def main(path: str) -> None:
    started = False
    for _ in range(500):
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
            break
        except OSError:
            client.close()
        if not started:  # not where the error is handled: each traceback of a cell would name it
            start(path)
            started = True
        time.sleep(0.01)
    client.sendall(sys.stdin.buffer.read())
    client.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: client.recv(65536), b""))
    sys.stdout.buffer.write(answer[:-1])
    sys.exit(0 if answer.endswith(b"\0") else 3)  # 3: the process ended with the cell


if __name__ == "__main__":
    main(sys.argv[1])

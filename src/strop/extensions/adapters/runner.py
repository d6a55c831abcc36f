"""Runs an object of a library in an interpreter that has the library: ``runner.py FILE:Class``. It does not import Strop.

``runner_process.py`` starts it. Protocol: lines of JSON on standard input and output, requests and answers with an ``id``; ``call`` is a
coroutine method of the class, the other keys are its arguments. When the input ends, ``close`` of the object is awaited, and everything
that is left in the process group is killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

CLOSE_SECONDS = 10.0  # for ``close``


async def serve(worker: Any, replies: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, call: str, arguments: dict[str, Any]) -> None:
        try:
            reply = {"id": number, "value": await getattr(worker, call)(**arguments)}
        except asyncio.CancelledError:
            return
        except BaseException as error:  # whatever the library raises is the answer
            reply = {"id": number, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def forget(number: int, task: asyncio.Task[None]) -> None:
        running.pop(number, None)

    while line := await reader.readline():
        request = json.loads(line)
        if request["call"] == "cancel":
            if (cancelled := running.pop(request["of"], None)) is not None:
                cancelled.cancel()
            continue
        number, call = request.pop("id"), request.pop("call")
        running[number] = task = asyncio.create_task(answer(number, call, request))
        task.add_done_callback(partial(forget, number))
    for task in running.values():
        task.cancel()
    await asyncio.wait_for(worker.close(), CLOSE_SECONDS)


def load_worker(name: str) -> Any:
    file, _, cls = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, cls)()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files have names of libraries
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        asyncio.run(serve(load_worker(sys.argv[1]), answers))
    finally:
        os.killpg(0, signal.SIGKILL)

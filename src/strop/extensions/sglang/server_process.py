"""The processes of one SGLang server: started in a separate group, and ended together."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from strop.extensions.sglang.server.server_entry import REFUSED_PREFIX, REFUSED_STATUS
from strop.extensions.sglang.sglang_launch import SglangLaunch, make_server_arguments, write_empty_adapter

OUTPUT_TAIL_LINES = 12  # lines of an engine's output in the message about its death
END_SECONDS = 3.0  # that a server has to end by itself


class ServerProcess:
    """A server of SGLang on this machine. It listens on a free port of the loopback interface and answers to one secret key."""

    def __init__(self, launch: SglangLaunch) -> None:
        self.launch = launch
        self.key = secrets.token_urlsafe(32)
        self.port = _free_port()
        # SGLang leaves the files of its sockets behind, in the folder for temporary files
        self.folder = Path(tempfile.mkdtemp(prefix="strop-sglang-"))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        launch, output = self.launch, self._open_output()
        arguments = make_server_arguments(launch, port=self.port, key=self.key)
        if launch.adapters is not None:
            arguments |= write_empty_adapter(launch.adapters, self.folder / "adapter")
        options = {"arguments": arguments}
        try:
            process = subprocess.Popen(
                [launch.python, "-W", "ignore", "-m", "strop.extensions.sglang.server.server_entry"],
                env={**os.environ, **launch.env_vars, "TMPDIR": str(self.folder)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        finally:
            if output is not None:
                output.close()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the caller will see
            json.dump(options, process.stdin)
            process.stdin.close()
        return process

    def _open_output(self) -> IO[Any] | None:
        if (file := self.launch.output_file) is None:
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("a")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def refusal(self) -> str:
        """Why the server refused its options; empty if it did not."""
        if self._process.poll() != REFUSED_STATUS:
            return ""
        lines = [line for line in self._output_lines() if line.startswith(REFUSED_PREFIX)]
        return lines[-1].removeprefix(REFUSED_PREFIX) if lines else "it does not say why"

    def describe_end(self) -> str:
        """Return the last lines of the output of the server's processes, as the end of a message."""
        lines = self._output_lines()[-OUTPUT_TAIL_LINES:]
        return f"; the end of {self.launch.output_file}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""

    def _output_lines(self) -> list[str]:
        file = self.launch.output_file
        return [] if file is None or not file.exists() else file.read_text(errors="replace").splitlines()

    def end(self) -> None:
        """End every process of the server. Blocks for up to a few seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

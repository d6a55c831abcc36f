"""A process that tokenizes recorded conversations: ``python -m strop.extensions.recorded.tokenizing_worker``.

It reads messages from its standard input, each a pickle after its length: first (chat template, rules), answered with "ready",
then one message per group of conversations, answered with their tokens. It exits when its input is closed, so it does not outlive
the run.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from contextlib import suppress
from typing import IO, Any

from strop.extensions.recorded.recorded_tokens import tokenize_group

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


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    serve(sys.stdin.buffer, answers)
    os._exit(0)

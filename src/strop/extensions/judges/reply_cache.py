"""Replies that were given before: in memory, or in a folder that processes and runs share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoredReply:
    """What is kept of a reply: neither the request nor a key."""

    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class ReplyCache:
    """Keeps the newest ``size`` replies, and all of them in ``folder`` if there is one. Only one thread uses it."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self._size = size
        self._folder = folder
        self._replies: OrderedDict[str, StoredReply] = OrderedDict()

    @staticmethod
    def key(request: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> StoredReply | None:
        reply = self._replies.get(key)
        if reply is None and self._folder is not None and (reply := self._read(self._path(key))) is not None:
            self._remember(key, reply)
        if reply is not None:
            self._replies.move_to_end(key)
        return reply

    def put(self, key: str, reply: StoredReply) -> None:
        self._remember(key, reply)
        if self._folder is not None:
            self._write(self._path(key), reply)

    def _remember(self, key: str, reply: StoredReply) -> None:
        self._replies[key] = reply
        if len(self._replies) > self._size:
            self._replies.popitem(last=False)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"

    def _read(self, path: Path) -> StoredReply | None:
        """Return the reply of a file, None if there is none or it cannot be read."""
        try:
            return StoredReply(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning("the cached reply %s cannot be read (%s): the model is asked again", path, error)
            return None

    def _write(self, path: Path, reply: StoredReply) -> None:
        """Write a reply whole or not at all. A cache that cannot be written is a warning: the reply itself is good."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(reply)), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            log.warning("the reply could not be cached in %s: %s", path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

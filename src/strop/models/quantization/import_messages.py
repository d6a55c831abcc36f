"""Import messages of torchao (imported by Transformers) that are meaningless without its GPU libraries."""

from __future__ import annotations

import logging

# Loggers, and parts of their messages: CUDA libraries do not load on a CPU, and torch warns of enums registered by torchao.
MESSAGES = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}


class MessageFilter(logging.Filter):
    """Drops messages that contain a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in str(record.msg)


def hide_import_messages() -> None:
    """Hide these messages: they do not concern a run without FP8, and a run with FP8 checks its requirements itself."""
    for name, text in MESSAGES.items():
        logging.getLogger(name).addFilter(MessageFilter(text))

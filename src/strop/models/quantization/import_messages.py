"""What torchao says when it is imported, with Transformers, where its libraries for GPUs are of no use."""

from __future__ import annotations

import logging

# Loggers, and parts of their messages: on a CPU libraries of CUDA do not load, and torch warns of enums that torchao registers.
MESSAGES = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}


class MessageFilter(logging.Filter):
    """Leaves out messages with a text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in str(record.msg)


def hide_import_messages() -> None:
    """Leave these messages out: a run without FP8 has nothing to do with them, and one with FP8 is told what it lacks by itself."""
    for name, text in MESSAGES.items():
        logging.getLogger(name).addFilter(MessageFilter(text))

"""Whether the Python code that models bring may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

TRUST_VARIABLE = "STROP_TRUST_REMOTE_CODE"  # environment variable


def trusts_remote_code() -> bool:
    """Whether the Python code that models bring may run."""
    return os.environ.get(TRUST_VARIABLE) == "1"


@contextmanager
def trust_remote_code(trusted: bool) -> Iterator[None]:
    """Let models' own code run inside the context if ``trusted``, also in the processes that are started there."""
    before = os.environ.get(TRUST_VARIABLE)
    if trusted:
        os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if trusted and before is None:
            del os.environ[TRUST_VARIABLE]

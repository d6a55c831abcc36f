"""Whether Python code contained in models may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

TRUST_VARIABLE = "STROP_TRUST_REMOTE_CODE"  # environment variable


def trusts_remote_code() -> bool:
    """Whether Python code contained in models may run."""
    return os.environ.get(TRUST_VARIABLE) == "1"


@contextmanager
def trust_remote_code(trusted: bool) -> Iterator[None]:
    """Allow models' own code inside the context if ``trusted``, including in processes started there."""
    before = os.environ.get(TRUST_VARIABLE)
    if trusted:
        os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if trusted and before is None:
            del os.environ[TRUST_VARIABLE]

"""Run a command and turn errors that the user can fix into a message and an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import warnings
from collections.abc import Coroutine
from typing import Any

from strop.checkpointing.folders import CheckpointError
from strop.cluster.base import HostDied
from strop.cluster.group import GroupDied
from strop.data.errors import DataError
from strop.environments.base import EnvironmentConfigError
from strop.loop import OutOfTasks, TooManyDropped
from strop.mismatch import MismatchTooLarge
from strop.models.loading import ModelNotFound
from strop.weights.base import EngineDied, TransportError
from strop.weights.proof import ProofFailed

log = logging.getLogger(__name__)

# Errors that the user can fix: print the message without a traceback.
MISTAKES = (
    *(ModelNotFound, DataError, EnvironmentConfigError, CheckpointError),
    *(
        GroupDied,
        HostDied,
        TooManyDropped,
        OutOfTasks,
        MismatchTooLarge,
        ProofFailed,
        EngineDied,
        TransportError,
        ValueError,
        OSError,
    ),
)


def run_to_end(work: Coroutine[Any, Any, None]) -> int:
    """Run a command. Return 0 on success, 1 after printing an error that the user can fix."""
    _show_warnings_as_lines()
    try:
        asyncio.run(work)
    except MISTAKES as error:
        _say_mistake(error)
        return 1
    except LookupError as error:
        if type(error) is not LookupError:  # KeyError and IndexError are bugs
            raise
        _say_mistake(error)
        return 1
    return 0


def _say_mistake(error: Exception) -> None:
    """Print the message; with STROP_LOG=debug, also the traceback."""
    print(f"error: {error}", file=sys.stderr)
    log.debug("where the error was raised", exc_info=error)
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    raised = isinstance(error, TooManyDropped) or (isinstance(error, EnvironmentConfigError) and not isinstance(root, ValueError))
    if raised and not log.isEnabledFor(logging.DEBUG):
        print("Set STROP_LOG=debug to see the tracebacks of errors in environments.", file=sys.stderr)


def _show_warnings_as_lines() -> None:
    def show(message: Warning | str, category: type[Warning], *_: object) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show  # type: ignore[assignment]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("strop").setLevel(logging.DEBUG if os.environ.get("STROP_LOG", "").lower() == "debug" else logging.NOTSET)

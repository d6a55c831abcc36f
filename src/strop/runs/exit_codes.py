"""Run a command, and turn errors that the user can fix into a message and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Coroutine
from typing import Any

from strop.checkpointing.folders import CheckpointError
from strop.data.sources.records import DataError
from strop.distributed.actor_group import ActorGroupDied
from strop.distributed.base import ActorDied
from strop.environments.base import EnvironmentConfigError
from strop.learner.budget.device_memory import DeviceMemoryFull
from strop.models.loading import ModelNotFound
from strop.monitoring.message_style import configure_messages, discard_output, reader_is_gone
from strop.safety.exits import RunExited, run_coroutine
from strop.safety.printable import make_printable
from strop.stopping import EndRun
from strop.storage.files import StorageError
from strop.tools.base import InfrastructureError
from strop.trainer.run import TooFewTasks, TooManyDropped
from strop.user_code import find_user_place
from strop.weight_sync.base import EngineDied, TransportError
from strop.weight_sync.verification import VerificationFailed

log = logging.getLogger(__name__)

# Errors that the user can fix: print the message without a traceback.
USER_ERRORS = (
    ModelNotFound,
    DataError,
    EnvironmentConfigError,
    CheckpointError,
    StorageError,
    ActorGroupDied,
    ActorDied,
    TooManyDropped,
    TooFewTasks,
    EndRun,
    VerificationFailed,
    EngineDied,
    TransportError,
    RunExited,
    DeviceMemoryFull,
    InfrastructureError,
    ValueError,
    OSError,
)


def run_command(work: Coroutine[Any, Any, object], *, quiet: bool = False) -> int:
    """Run a command and print its result, unless it is None. Return 0 on success, 1 after printing an error that the user can
    fix.

    Raises BrokenPipeError if the reader of the output is gone.
    """
    configure_messages()
    try:
        said = run_coroutine(work)
    except USER_ERRORS as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise
        _print_error(error)
        return 1
    except LookupError as error:
        if type(error) is not LookupError:  # KeyError and IndexError are bugs
            raise
        _print_error(error)
        return 1
    if said is not None and not quiet:
        try:
            print(said, flush=True)
        except BrokenPipeError:  # the command itself succeeded
            discard_output()
    return 0


def _print_error(error: Exception) -> None:
    """Print the message, with the location and traceback of errors in user code; with STROP_LOG=debug, always print the
    traceback.
    """
    print(f"error: {make_printable(str(error)) or type(error).__name__}", file=sys.stderr)
    log.debug("where the error was raised", exc_info=error)
    if log.isEnabledFor(logging.DEBUG):
        return
    if (place := find_user_place(error)) is not None:
        print(f"It came through your code ({place}):\n{make_printable(place.traceback)}", file=sys.stderr)
    elif isinstance(error, TooManyDropped | EnvironmentConfigError) and not isinstance(_find_root(error), ValueError):
        print("Set STROP_LOG=debug to see the tracebacks of errors in environments.", file=sys.stderr)


def _find_root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error

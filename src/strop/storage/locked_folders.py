"""The folders written by a run: created, locked and tested before anything in them is read or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from strop.storage.folder_lock import FolderLock, FolderLocked
from strop.storage.folder_probe import explain_folder, prepare_folder, probe_folder
from strop.storage.short_path import shorten_path
from strop.storage.storage_error import StorageError


@contextmanager
def lock_folders(
    folders: Mapping[str, Path], *, log_dir: Path | None = None, hint: str = "", check: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold folders, given by configuration keys, for the duration of the context. A folder under two keys is locked once.

    ``check`` is called when all are locked.

    Raises FolderLocked if another run holds one of them, and StorageError if one is not writable. Then none stays locked, and
    newly created ones are removed.
    """
    created: list[Path] = []
    with ExitStack() as stack:
        seen: set[tuple[int, int]] = set()
        try:
            for key, folder in ((key, shorten_path(folder)) for key, folder in folders.items()):
                if not folder.exists():
                    created.append(folder)
                prepare_folder(key, folder)
                identity = (folder.stat().st_dev, folder.stat().st_ino)
                if identity not in seen:
                    seen.add(identity)
                    stack.callback(_lock(key, folder, log_dir, hint).release)
                probe_folder(key, folder)
            check()
        except BaseException:
            stack.close()
            for folder in reversed(created):
                with suppress(OSError):  # not empty
                    folder.rmdir()
            raise
        yield


def _lock(key: str, folder: Path, log_dir: Path | None, hint: str) -> FolderLock:
    try:
        return FolderLock.acquire(folder, log_dir=log_dir)
    except FolderLocked as error:
        raise FolderLocked(f"{key}: {error}, or set another {key}{hint}") from None
    except OSError as error:
        raise StorageError(f"{key}: {explain_folder(folder, error)}") from error

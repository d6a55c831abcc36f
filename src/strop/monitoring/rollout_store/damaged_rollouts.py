"""What is said of a stored file that cannot be read: which one, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAGIC = b"PAR1"  # a parquet file begins and ends with it
_ADVICE = "copy it again if it is a copy, else move it away; the other steps can still be read"


class DamagedRollouts(ValueError):
    """A stored file cannot be read. ``str()`` names its path; ``brief`` its name alone."""

    def __init__(self, path: Path, why: str) -> None:
        self.brief = f"{path.name} cannot be read: {why}; {_ADVICE}"
        super().__init__(f"{path} cannot be read: {why}; {_ADVICE}")


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Raise DamagedRollouts for what a reader says of a damaged file. Errors of the system, as of a missing file, pass."""
    try:
        yield
    except DamagedRollouts:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DamagedRollouts(path, _find_damage(path) or _describe(error)) from error


def _find_damage(path: Path) -> str:
    """Return what can be seen from outside: a file that is empty, cut off, or no parquet file; "" if nothing."""
    try:
        size = path.stat().st_size
        if size == 0:
            return "it is empty"
        if path.suffix != ".parquet":
            return ""
        with path.open("rb") as file:
            begins = file.read(4) == _MAGIC
            file.seek(max(0, size - 4))
            ends = file.read(4) == _MAGIC
    except OSError:
        return ""
    if not begins:
        return "it is no parquet file, or its beginning was overwritten"
    return "" if ends else f"it ends in the middle, after {size} bytes: it was cut off"


def _describe(error: Exception) -> str:
    """The first line of an error; the name of a class tells more of a KeyError than its text."""
    text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    if isinstance(error, KeyError):
        return f"it has no {text}, so it is no file of this store, or was changed"
    return f"its contents are damaged ({text or type(error).__name__})"

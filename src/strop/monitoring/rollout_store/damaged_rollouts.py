"""Messages about a stored file that cannot be read: its name, the damage, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAGIC = b"PAR1"  # a parquet file begins and ends with it
_ADVICE = "copy it again if it is a copy, else move it away; the other steps can still be read"


class DamagedRollouts(ValueError):
    """A stored file cannot be read. ``str()`` names its path; ``brief`` only its name."""

    def __init__(self, path: Path, why: str) -> None:
        self.brief = f"{path.name} cannot be read: {why}; {_ADVICE}"
        super().__init__(f"{path} cannot be read: {why}; {_ADVICE}")


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Convert a reader's error for a damaged file into DamagedRollouts. System errors, such as for a missing file, pass."""
    try:
        yield
    except DamagedRollouts:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DamagedRollouts(path, _find_damage(path) or _describe(error)) from error


def _find_damage(path: Path) -> str:
    """Return visible damage: a file that is empty, truncated, or not parquet; "" if there is none."""
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
        return "it is not a parquet file, or its beginning was overwritten"
    return "" if ends else f"it ends in the middle, after {size} bytes: it was cut off"


def _describe(error: Exception) -> str:
    """The first line of an error, reworded if a column is missing, because then the file has other content."""
    text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
    if isinstance(error, KeyError) or "FieldRef" in text:
        return "it lacks columns that every step has, so it is no file of stored rollouts, or was changed"
    return f"its contents are damaged ({text or type(error).__name__})"

"""Examples that a reader marked: ``stars.jsonl`` in the log folder, one JSON object a line."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.extensions.view.view_error import ViewError
from strop.storage.files import atomic_write

STARS_FILE = "stars.jsonl"
LONGEST_NOTE = 10_000  # characters
MOST_STARS = 100_000
Key = tuple[bool, int, int, int]

_lock = threading.Lock()


@dataclass(frozen=True)
class Star:
    """A marked rollout of training or of a validation."""

    step: int
    group: int
    sample: int
    note: str = ""
    validation: bool = False

    @property
    def key(self) -> Key:
        return self.validation, self.step, self.group, self.sample


def read_stars(folder: Path) -> dict[Key, Star]:
    """Read the stars of a run; lines that are none are left out."""
    try:
        lines = (folder / STARS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    stars: dict[Key, Star] = {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            values = json.loads(line)
            step, group, sample = (int(values[name]) for name in ("step", "group", "sample"))
            star = Star(step, group, sample, str(values.get("note", "")), bool(values.get("validation")))
            stars[star.key] = star
    return stars


def change_star(folder: Path, request: Any) -> dict[Key, Star]:
    """Add, change or remove a star as a request says, and return all. Raises ViewError."""
    star, starred = _read_request(request)
    with _lock:
        stars = read_stars(folder)
        if starred:
            stars[star.key] = star
        else:
            stars.pop(star.key, None)
        if len(stars) > MOST_STARS:
            raise ViewError(f"there are {MOST_STARS} stars already; remove some of {STARS_FILE}", 409)
        _write(folder, stars)
    return stars


def _read_request(request: Any) -> tuple[Star, bool]:
    if not isinstance(request, dict):
        raise ViewError("a star is an object with step, group, sample, starred and note", 400)
    numbers = [request.get(name) for name in ("step", "group", "sample")]
    note, starred, validation = request.get("note", ""), request.get("starred", True), request.get("validation", False)
    valid = all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**53 for number in numbers)
    if not valid or not isinstance(note, str) or not isinstance(starred, bool) or len(note) > LONGEST_NOTE:
        raise ViewError(
            "a star needs the numbers step, group and sample, starred as true or false, and a note of at most "
            f"{LONGEST_NOTE} characters",
            400,
        )
    step, group, sample = (int(number or 0) for number in numbers)
    note = note.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates cannot be stored
    return Star(step, group, sample, note, bool(validation)), starred


def _write(folder: Path, stars: dict[Key, Star]) -> None:
    try:
        with atomic_write(folder / STARS_FILE) as temporary:
            temporary.write_text(
                "".join(json.dumps(asdict(star), ensure_ascii=False) + "\n" for star in stars.values()), encoding="utf-8"
            )
    except OSError as error:
        raise ViewError(f"the star cannot be stored in {STARS_FILE} of the run: {error.strerror}", 409) from None

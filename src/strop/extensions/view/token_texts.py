"""The texts of tokens, by a run's tokenizer, read once without torch, without network and without code of the model.

A ``tokenizer.json`` in the model's folder or in the hub's cache is read directly. Otherwise a separate process loads the tokenizer as a
run does (some models come as one file) and hands it over in that form.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.extensions.view.viewed_run import ViewError
from strop.safety.printable import make_printable
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


log = logging.getLogger(__name__)

FILE = "tokenizer.json"
LOADING_SECONDS = 120.0
WAIT_SECONDS = 0.4  # for which an answer waits; its texts come without, and the page asks again
LONGEST = 200_000  # tokens whose texts are made
_LOAD = """
import sys
from strop.models.loading import load_tokenizer
sys.stdout.write(load_tokenizer(sys.argv[1]).backend_tokenizer.to_str())
"""


class TokenTexts:
    """The tokenizers of the runs that are shown, by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()

    def split(self, config: Mapping[str, Any], tokens: Sequence[int]) -> list[str] | None:
        """Return the text of each token ([T]); None without the run's tokenizer, or while it is being read for longer than a moment."""
        name = find_tokenizer_name(config)
        if name is None or not tokens or len(tokens) > LONGEST:
            return None
        try:
            tokenizer = self.load(name).result(timeout=WAIT_SECONDS)
            if tokenizer is None:
                return None
            pieces = split_text(tokens, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
            return [make_printable(piece) for piece in pieces]
        except TimeoutError:
            return None
        except Exception as error:  # ids beyond this tokenizer's: it is not the one that the run had
            log.info("the tokens of a rollout cannot be written by %s: %s", name, error)
            return None

    def load(self, name: str) -> Future[Any]:
        """Begin to read a tokenizer by the name of its model, unless that was begun; its result is None if it cannot be read."""
        with self._lock:
            if name not in self._tokenizers:
                found = self._tokenizers[name] = Future()
                threading.Thread(target=lambda: found.set_result(_load(name)), name="tokenizer", daemon=True).start()
            return self._tokenizers[name]

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Begin to read a run's tokenizer, so that it is there when a rollout is opened."""
        name = find_tokenizer_name(config)
        if name is not None:
            self.load(name)

    def is_pending(self, config: Mapping[str, Any]) -> bool:
        """Return whether a run's tokenizer is being read."""
        name = find_tokenizer_name(config)
        return name is not None and not self.load(name).done()


def split_text(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text that each token adds. A character of several tokens belongs to the last of them."""
    pieces: list[str] = []
    start = done = 0  # decoding begins some tokens earlier, because some tokenizers drop a space at the beginning
    for end in range(1, len(tokens) + 1):
        before, text = decode(list(tokens[start:done])), decode(list(tokens[start:end]))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens) and end - done < 4:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces


def find_tokenizer_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of a run's tokenizer: that of its model, unless it has another."""
    policy = config.get("policy")
    if not isinstance(policy, Mapping):
        return None
    tokenizer = policy.get("tokenizer")
    own = tokenizer.get("name") if isinstance(tokenizer, Mapping) else None
    name = own or policy.get("model_name")
    return name if isinstance(name, str) and name else None


def _load(name: str) -> Any:
    try:
        from tokenizers import Tokenizer

        file = _find_file(name)
        return Tokenizer.from_file(str(file)) if file is not None else Tokenizer.from_str(_load_elsewhere(name))
    except Exception as error:  # tokenizers raises Exception itself
        log.warning("tokens are shown without their texts, because the tokenizer %s cannot be read: %s", name, str(error)[:300])
        return None


def _find_file(name: str) -> Path | None:
    """Return the tokenizer's file in a folder, or of a snapshot in the hub's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / FILE if (folder / FILE).is_file() else None
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub") / f"models--{name.replace('/', '--')}"
    try:
        snapshot = cache / "snapshots" / (cache / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return snapshot / FILE if (snapshot / FILE).is_file() else None


def _load_elsewhere(name: str) -> str:
    """Return the tokenizer as JSON, loaded by another process. Raises RuntimeError."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "STROP_TRUST_REMOTE_CODE": "0"}
    outcome = subprocess.run(
        [sys.executable, "-c", _LOAD, name],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LOADING_SECONDS,
        env={**os.environ, **offline},
        stdin=subprocess.DEVNULL,
    )
    if outcome.returncode:
        lines = outcome.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"its process ended with {outcome.returncode}")
    return outcome.stdout

"""One run as the view reads it: each of its files when it is asked for, and again when it changed."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.extensions.view.metric_history import MetricHistory
from strop.extensions.view.view_error import ViewError
from strop.monitoring.config_history import HISTORY_FILE, read_finish
from strop.monitoring.rollout_index.rollout_index import RolloutIndex
from strop.monitoring.rollout_store.rollout_store import ROLLOUTS_FOLDER
from strop.monitoring.rollout_store.stored_images import StoredImages
from strop.monitoring.rollout_store.validation_samples import ValidationSamples
from strop.monitoring.trackers.jsonl import METRICS_FILE
from strop.monitoring.watchdog.doctor import ALIVE, find_verdict
from strop.monitoring.watchdog.status import Status, read_status
from strop.safety.printable import make_printable
from strop.safety.redaction import redact_arguments, redact_secrets, redact_yaml
from strop.storage.json_values import clean_json

CONFIG_FILE = "config.yaml"
KINDS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")  # sections of a configuration, and commands
IMAGE_TYPES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"RIFF", "image/webp"))
LARGEST_REPLAY = 64 * 2**20  # bytes
RECENT_SECONDS = 60.0  # a run without status.json that wrote metrics so recently counts as live


class ViewedRun:
    """A log folder."""

    def __init__(self, id: str, folder: Path, parse_yaml: Callable[[str], Any]) -> None:
        self.id, self.folder = id, folder
        self._parse_yaml = parse_yaml
        self._config: tuple[tuple[int, ...], Mapping[str, Any]] = ((), {})
        self.metrics = MetricHistory(folder / METRICS_FILE)
        self.rollouts = RolloutIndex(folder)

    @cached_property
    def name(self) -> str:
        parent = self.folder.parent.name
        return f"{parent}/{self.folder.name}" if self.folder.name in ("logs", "log") and parent else self.folder.name

    @property
    def updated(self) -> float | None:
        """When the run wrote last (Unix time)."""
        times = [when for name in (METRICS_FILE, "status.json", CONFIG_FILE) if (when := _changed(self.folder / name))]
        return max(times, default=None)

    def validation(self) -> ValidationSamples:
        return ValidationSamples(self.folder)

    def validation_steps(self) -> list[int]:
        return self.validation().steps() if (self.folder / "validation").is_dir() else []

    def status(self) -> Status | None:
        """Read status.json; None if there is none. Raises ViewError for a file of another version or a half-written one."""
        try:
            return read_status(self.folder)
        except (ValueError, OSError, AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ViewError(f"status.json cannot be read: {str(error)[:300]}", 422) from None

    def is_live(self) -> bool:
        try:
            status = self.status()
        except ViewError:
            status = None
        if status is not None:
            return find_verdict(status)[0] in ALIVE
        changed = _changed(self.folder / METRICS_FILE)
        return changed is not None and time.time() - changed < RECENT_SECONDS and read_finish(self.folder) is None

    def config(self) -> Mapping[str, Any]:
        """Return the configuration as nested dicts, without secrets; empty if there is none. Raises ViewError."""
        files = [self.folder / HISTORY_FILE, self.folder / CONFIG_FILE]
        stamp = tuple(int((_changed(file) or 0) * 1e6) for file in files)
        if self._config[0] != stamp:
            self._config = (stamp, redact_secrets(self._read_config()))
        return self._config[1]

    def _read_config(self) -> Mapping[str, Any]:
        recorded = _read_history(self.folder / HISTORY_FILE)
        if recorded is not None:  # JSON is read a hundred times as fast as YAML
            return recorded
        try:
            values = self._parse_yaml((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except Exception as error:  # YAML readers raise classes of their own
            raise ViewError(f"{CONFIG_FILE} cannot be read: {str(error)[:300]}", 422) from None
        return values if isinstance(values, dict) else {}

    def config_text(self) -> str:
        """Return config.yaml, without secrets."""
        try:
            text = (self.folder / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return redact_yaml(text)

    def describe_config(self) -> dict[str, Any]:
        """Return config.yaml and the settings by key, without secrets. Raises ViewError."""
        described: dict[str, Any] = clean_json(
            {"text": make_printable(self.config_text()), "values": dict(flatten(self.config()))}
        )
        return described

    def replays(self) -> list[dict[str, Any]]:
        """Return the stored results of ``strop replay``; a file that is half-written is left out."""
        found = []
        for path in sorted((self.folder / "replays").glob("*.json")):
            try:
                if path.is_file() and path.stat().st_size <= LARGEST_REPLAY:
                    values = json.loads(path.read_text(encoding="utf-8"))
                    found.append({"file": path.name, **clean_json(values if isinstance(values, dict) else {"result": values})})
            except (OSError, ValueError):
                continue
        return found

    def image(self, name: str) -> tuple[bytes, str]:
        """Return the content and the type of a stored image. Raises ViewError."""
        if not (name.isascii() and name.isalnum()):
            raise ViewError("an image is named by letters and digits", 400)
        for folder in (self.folder / ROLLOUTS_FOLDER, self.validation().folder):
            path = StoredImages(folder).find(name)
            if path is not None and path.resolve().is_relative_to(self.folder.resolve()):  # not a link out of the run
                content = path.read_bytes()
                kind = next((kind for start, kind in IMAGE_TYPES if content.startswith(start)), None)
                if kind is None or (kind == "image/webp" and content[8:12] != b"WEBP"):
                    raise ViewError("this image is not PNG, JPEG or WebP, and is not shown", 415)
                return content, kind
        raise ViewError(f"the image {name[:80]} is not stored")

    def kind(self) -> str:
        """Return the command that the run was started with: grpo, sft, ..."""
        config = self._config_or_nothing()
        return next((kind for kind in KINDS if isinstance(config.get(kind), dict)), "")

    def describe(self) -> dict[str, Any]:
        """Return what the list of runs says of it."""
        config, kind = self._config_or_nothing(), self.kind()
        steps = self.rollouts.steps()
        try:
            status = self.status()
        except ViewError:
            status = None
        section = config.get(kind) or {}
        return {
            "id": self.id,
            "name": str(config.get("run_name") or self.name),
            "folder": str(self.folder),
            "kind": kind,
            "algorithm": _find(config, "algorithm", "name") or kind,
            "model": _find(config, "policy", "model_name"),
            "seed": section.get("seed"),
            "live": self.is_live(),
            "state": None if status is None else find_verdict(status)[0],
            "step": max(self.metrics.last_step_on_disk(), 0 if status is None else status.step),
            "max_steps": section.get("max_num_steps"),
            "started": None if status is None else status.started,
            "updated": self.updated,
            "has_rollouts": bool(steps),
            "steps_with_rollouts": [steps[0], steps[-1], len(steps)] if steps else None,
            "validations": self.validation_steps(),
        }

    def describe_unread(self, error: Exception) -> dict[str, Any]:
        """Return what the list of runs says of one whose files cannot be read."""
        nothing = dict.fromkeys(("kind", "algorithm"), "") | dict.fromkeys(
            ("model", "seed", "max_steps", "started", "steps_with_rollouts")
        )
        why = f"unreadable ({type(error).__name__}: {str(error)[:200]})"
        about = {"id": self.id, "name": self.name, "folder": str(self.folder), "live": False, "state": why, "step": 0}
        return {**nothing, **about, "updated": self.updated, "has_rollouts": False, "validations": []}

    def _config_or_nothing(self) -> Mapping[str, Any]:
        try:
            return self.config()
        except ViewError:
            return {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key. A list is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _find(values: Mapping[str, Any], *path: str) -> Any:
    found: Any = values
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read_history(path: Path) -> dict[str, Any] | None:
    """Return the settings that held last, from the history of the configuration; None without one."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        config: dict[str, Any] = lines[0]["config"]
        for line in lines[1:]:
            for key, (_, new) in (line.get("changed") or {}).items():
                _set(config, key.split("."), new)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _set(values: dict[str, Any], path: list[str], new: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = new


def hide_secret_words(command: str) -> str:
    """Return a command without secrets."""
    try:
        return shlex.join(redact_arguments(shlex.split(command)))
    except ValueError:
        return command

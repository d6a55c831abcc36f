"""The last lines of a run on the command line: a summary, warnings, and commands to continue with, ready to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.monitoring.console.columns import format_duration

WITH_ROLLOUTS = ("grpo", "ppo", "distillation")  # kinds of run that store rollouts
GENERATING = (*WITH_ROLLOUTS, "sft", "dpo")  # kinds of run whose model generates text; the others train a reward model
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The content of the last lines."""

    section: str
    log_dir: Path
    stores_rollouts: bool
    checkpoint: Path | None  # the newest complete one
    seconds: float  # of this start
    tokens: float  # trained on since the beginning of the run
    warnings: Sequence[str] = ()
    failed_trackers: Sequence[str] = ()
    hints: Sequence[str] = ()  # of the trackers

    def __str__(self) -> str:
        took = f"{format_duration(self.seconds)}, {self.tokens:,.0f} tokens trained on"
        lines = [f"took        {took}"]
        if self.checkpoint is not None:
            lines.append(f"checkpoint  {self.checkpoint} ({format_size(folder_size(self.checkpoint))})")
        lines += [*map(_shorten_warning, self.warnings), *(f"warning: {failed}" for failed in self.failed_trackers), *self.hints]
        return "\n".join([*lines, "next:", *(f"    {command}" for command in self.commands())])

    def commands(self) -> list[str]:
        """Return the commands that work for this kind of run."""
        logs = shlex.quote(str(self.log_dir))
        found = [f"strop plot {logs}", f"strop report {logs}"]
        if self.stores_rollouts:
            found.append(f"strop rollouts {logs} --worst 3")
        if self.checkpoint is not None:
            model = shlex.quote(str(self.checkpoint))
            found += [f"strop eval {model}"] if self.section in WITH_ROLLOUTS else []
            found.append(f"strop export {model} OUT")
            found += [f"strop serve {model}"] if self.section in GENERATING else []
        return found


def _shorten_warning(text: str) -> str:
    """Return the first sentence of a warning, which was already printed in full, and where to read more."""
    sentence, _, rest = text.partition(". ")
    read_on = re.search(r" \(docs/\S+\)$", rest)
    return sentence + (read_on[0] if read_on else "")


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def format_size(size: float) -> str:
    """Format a number of bytes: 812 B, 1.6 GB."""
    power = 0
    while size >= 1000 and power < len(UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.0f} {UNITS[power]}" if power < 2 or size >= 100 else f"{size:.1f} {UNITS[power]}"

"""The turns of a conversation as one text, each but the first marked with its role, for lists and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.monitoring.rollout_store.turn_record import TurnRecord


def join_turns(turns: Sequence[TurnRecord | Mapping[str, Any]] | None, completion: str | None) -> str:
    """Return the main path: ``I ask [tool calculator] 4 [assistant] It is 4``, one turn per line.

    ``turns`` are records or rows of a file; without any, as in files of earlier versions, ``completion`` is used."""
    rows = [vars(turn) if isinstance(turn, TurnRecord) else turn for turn in turns or ()]
    main = [row for row in rows if not row.get("path")]
    if not main:
        return completion or ""
    first, *rest = main
    opened = "" if first.get("sampled") else f"{_mark(first)} "
    return "\n".join([f"{opened}{first.get('text') or ''}", *(f"{_mark(row)} {row.get('text') or ''}" for row in rest)])


def _mark(row: Mapping[str, Any]) -> str:
    return f"[{' '.join(filter(None, (row.get('role'), row.get('tool'))))}]"

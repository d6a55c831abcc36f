"""Fields of messages that no part of a run reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from strop.data.data_config import DataEntryConfig
from strop.data.messages import REASONING_FIELDS
from strop.data.sources.records import DataError, Records

LOOKED_AT = 1000  # records
READ = frozenset(
    (
        *("role", "content", "from", "value", "weight", "tool_calls", "function_call", "tool_call_id", "name", "images", "type"),
        *REASONING_FIELDS,
    )
)


def find_unread_fields(entry: DataEntryConfig, records: Records) -> Iterator[tuple[str, int, str]]:
    """Yield each field of messages that is set and not read: its name, the number of records with it, and the first of them."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    step = max(1, len(records) // LOOKED_AT)
    for index in range(0, len(records), step):
        try:
            record = records[index]
        except DataError:
            continue
        for key in {key for message in _iter_messages(record) for key, value in message.items() if key not in READ and value}:
            counts[key] += 1
            first.setdefault(key, records.location(index))
    for key, count in counts.most_common(5):
        yield key, count, first[key]


def _iter_messages(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every message in the columns of a record."""
    for value in record.values():
        if isinstance(value, list):
            yield from (
                each for each in value if isinstance(each, Mapping) and ({"role", "content"} <= set(each) or "from" in each)
            )

"""The steps of a run as the rows of a table, with a header that is repeated now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.monitoring.console.columns import TOTAL_TIME, Column, choose_columns, format_seconds

HEADER_PERIOD = 20  # rows between two headers
SMALLEST_WIDTH = 7  # of a column
OPEN_WIDTH = 4  # width of a step number if the last one is unknown


class StepTable:
    """Formats one row per step. Columns appear once their metric has been logged, and stay; ``-`` means the step lacks the
    metric.
    """

    def __init__(self, columns: Sequence[Column], max_steps: int | None) -> None:
        self._columns = columns
        self._max_steps = max_steps
        self._seen: frozenset[str] = frozenset()
        self._header = ""
        self._rows_since_header = 0

    def see(self, metrics: Mapping[str, float]) -> None:
        """Register metrics that are not shown as a row, such as those of the step from which a run continues."""
        self._seen |= metrics.keys()

    def format_rows(self, step: int, metrics: Mapping[str, float], width: int | None = None) -> list[str]:
        """Return the row of a step, preceded by a header where one is due. ``width``: leave out the columns that do not fit."""
        self.see(metrics)
        steps = self._max_steps
        row = header = f"step {step:>{OPEN_WIDTH}}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"
        header = " " * len(row)
        for column in choose_columns(self._columns, self._seen):
            value = column.format(metrics[column.tag]) if column.tag in metrics else "-"
            size = max(len(column.label), SMALLEST_WIDTH)
            if width is not None and len(row) + 2 + size > width:
                break
            row, header = f"{row}  {value:>{size}}", f"{header}  {column.label:>{size}}"
        if TOTAL_TIME in metrics and (width is None or len(row) + 8 <= width):
            row, header = f"{row}  {format_seconds(metrics[TOTAL_TIME]):>6}", f"{header}  {'a step':>6}"
        due = header.split() != self._header.split() or self._rows_since_header >= HEADER_PERIOD
        self._rows_since_header = 1 if due else self._rows_since_header + 1
        self._header = header
        return [header, row] if due else [row]

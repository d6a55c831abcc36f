"""A matplotlib figure that a notebook displays without pyplot and its global state."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that is displayed when it is a cell's last value, with any notebook backend."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"image/png": self._repr_png_(), "text/plain": repr(self)}

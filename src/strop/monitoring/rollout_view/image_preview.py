"""Small copies of stored images for a page. PIL draws each anew, so that nothing of the file but its pixels reaches the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

LARGEST_SIDE = 240  # pixels
MOST_PIXELS = 64 * 10**6  # of a file that is opened


def make_preview(path: Path) -> str | None:
    """Return an image as a small ``data:`` URL; None if it cannot be read, or without PIL."""
    try:
        from PIL import Image

        with Image.open(path) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                return None
            small = opened.convert("RGB")
            small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            file = io.BytesIO()
            small.save(file, format="PNG", optimize=True)
    except Exception:  # PIL is missing, or raises one of its many classes for a damaged file
        return None
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

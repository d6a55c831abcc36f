"""The tiny model of whole runs."""

from __future__ import annotations

from loop.conftest import tiny as tiny

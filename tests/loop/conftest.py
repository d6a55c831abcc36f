"""A fixture with the folder of the tiny model, built once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.tiny import build_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")

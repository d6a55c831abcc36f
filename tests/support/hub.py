"""Local copies of the hub for tests: ``tests/fixtures/hub``, small made-up rows with the real schemas."""

from __future__ import annotations

from pathlib import Path

import pytest

HUB = Path(__file__).parents[1] / "fixtures" / "hub"


def use_local_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, folder: Path = HUB) -> Path:
    """Read data sets of the hub from ``folder``, here and in processes that are started, with a cache of their own."""
    import datasets

    monkeypatch.setenv("STROP_DATASETS", str(folder))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return folder

"""What a learner of a stranger's package saved is exported as an ordinary model."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.test_learners_of_others import ENTRY_POINTS, PACKAGE, save_as_theirs
from support.declared_packages import declare, finding, run_commands


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_layout_that_a_package_declares_is_exported(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(PACKAGE)
    declare(tmp_path, "theirs", ENTRY_POINTS)
    size = save_as_theirs(tmp_path / "saved")
    [(code, out, errors)] = run_commands(tmp_path, finding(tmp_path), ["export", "saved", "out"])
    assert code == 0 and "exporting saved (theirs in one file) to out" in out, errors
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(size, rel=0.01)
    assert not (tmp_path / "out" / "theirs.bin").exists()

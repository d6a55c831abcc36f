"""``strop.Run`` as a notebook reads it: data frames, figures, and what a cell shows, with nothing in it that a model wrote as markup."""

from __future__ import annotations

from pathlib import Path

import pytest

import strop
from strop import plugins
from support.html_pages import ParsedPage
from support.reported_runs import HOSTILE, STEPS, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> strop.Run:
    return strop.Run(write_run(tmp_path_factory.mktemp("runs") / "mine"))


def test_times_are_a_row_a_step_and_a_column_a_phase(run: strop.Run) -> None:
    assert list(run.timing.columns) == ["generation", "policy_training", "storing", "total_step_time"]
    assert len(run.timing) == STEPS and run.timing["total_step_time"][-1] == 3.2


def test_a_run_without_validations_and_rollouts_has_empty_tables(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", validations=False, steps=1)
    (folder / "rollouts" / "step_000001.parquet").unlink()
    found = strop.Run(folder)
    assert len(found.samples) == len(found.validations) == len(found.rollouts) == 0


def test_what_a_cell_shows_is_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>mine", text=HOSTILE, steps=2)
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("model_name: tiny", "model_name: <script>x"))
    page = ParsedPage(strop.Run(folder)._repr_html_())
    assert not page.unbalanced and {tag for tag, _ in page.elements} <= {
        "div", "table", "tr", "th", "td", "p", "small",
    }  # fmt: skip
    assert "<script>x" in page.texts["td"] and "0.5 to 1" in page.texts["td"]


def test_what_no_extension_brings_is_named(run: strop.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "declared", lambda group: {})
    with pytest.raises(ValueError, match=r"no extension declares 'report' in strop\.functions"):
        run.report()
    with pytest.raises(ValueError, match=r"no extension declares 'plot' in strop\.functions"):
        run.plot()
    with pytest.raises(ValueError, match=r"no extension declares 'ledger' in strop\.functions"):
        run.ledger(1, 0, 0)
    with pytest.raises(ValueError, match=r"no extension declares 'compare' in strop\.functions"):
        strop.compare("a", "b")

"""What a command prints when it ends with an error."""

from __future__ import annotations

import pytest

from strop.runs.exit_codes import run_command


@pytest.mark.parametrize(("error", "said"), [(TimeoutError(), "TimeoutError"), (OSError("no room"), "no room")])
def test_an_error_without_words_is_named_by_its_kind(capsys: pytest.CaptureFixture[str], error: Exception, said: str) -> None:
    async def fail() -> None:
        raise error

    assert run_command(fail()) == 1
    assert capsys.readouterr().err == f"error: {said}\n"

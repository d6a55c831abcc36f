"""``strop sandbox check``; ``serve`` is in tests/extensions/code/sandbox/test_remote_sandbox.py."""

from __future__ import annotations

import pytest

from strop.cli.commands import main
from strop.extensions.code.sandbox import launcher, sandbox_check
from strop.extensions.code.sandbox.base import ExitReason


def test_the_check_prints_a_line_for_each_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sandbox.level=namespaces"
    told = {line[2:34].strip(): line[34:37].strip() for line in lines[1:]}
    assert {told[name] for name in sandbox_check.PROMISES["namespaces"]} == {"yes"}
    assert set(launcher.LANGUAGES) == {name.removeprefix("runs ") for name in told if name.startswith("runs ")}


def test_a_promise_that_is_not_kept_is_named_and_the_exit_code_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_check, "PROBES", {"no network": "print('open')"})
    monkeypatch.setattr(sandbox_check, "ENDINGS", {"time limited": ("", ExitReason.TIME)})
    assert main(["sandbox", "check", "--level", "limits", "--workers", "1"]) == 1
    output = capsys.readouterr()
    assert "time limited                    NO" in output.out
    assert "no network                      no" in output.out
    assert output.err == "error: the level promises what this machine does not keep: time limited\n"


def test_a_machine_without_bubblewrap_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *arguments, **named: None)
    assert main(["sandbox", "check"]) == 1
    assert "apt-get install bubblewrap" in capsys.readouterr().err

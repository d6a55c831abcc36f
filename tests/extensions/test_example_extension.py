"""The package of examples/extension, installed as a user installs it, and used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loop.runs import overrides, tiny_config
from loop.tiny import build_tiny
from strop import cli
from support.declared_packages import finding, run_commands

EXAMPLE = Path(__file__).parents[2] / "examples" / "extension"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of a process that finds the package."""
    source, target = tmp_path_factory.mktemp("source") / "extension", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source)  # the build writes next to the sources
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    return finding(target)


def test_its_command_is_listed_and_runs(installed: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, said, _), (_, listed, _) = run_commands(tmp_path, installed, ["backwards", "abc", "xy"], ["--help"])
    assert said == "cba yx\n" and "spell words backwards" in listed
    with pytest.raises(SystemExit):
        cli.main(["backwards", "abc"])
    assert "no command 'backwards'" in capsys.readouterr().err


def test_a_run_uses_its_environment_and_its_listener(
    installed: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny(tmp_path / "model")
    left_out = ("env.arithmetic.max_operand", "env.arithmetic.wording")
    used = {"data.train.env_name": "backwards", "data.validation.env_name": "backwards", "env.backwards.letters": 2}
    settings = {**tiny_config(tmp_path / "model", grpo__max_num_steps=2), **dict.fromkeys(left_out, ...), **used}
    good, bad = ["grpo", *overrides({**settings, "repeats.enabled": True})], ["repeats.enabeld=true"]
    (status, _, said), (refused, _, why) = run_commands(tmp_path, installed, good, [*good, *bad])
    assert status == 0, said
    steps = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    shares = [step["train/repeated_answers"] for step in steps if "train/repeated_answers" in step]
    assert len(shares) == 2 and all(0 <= share <= 1 for share in shares)
    assert refused == 2 and "Did you mean repeats.enabled?" in why
    assert cli.main(["grpo", *overrides(settings)]) == 2
    assert "there is no environment 'backwards'" in capsys.readouterr().err

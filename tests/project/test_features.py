"""The table of docs/features.md, held against the code, and the length of README.md."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop.algorithm_factory import all_algorithms
from strop.config import TRAINING_RUNS, ConfigError, EvalRunConfig, load_config
from strop.config.run_checks import find_errors
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "features.md").read_text()
RUNS: dict[str, Any] = {**TRAINING_RUNS, "eval": EvalRunConfig}
BASES = {
    "grpo": "examples/configs/quickstart.yaml",
    "eval": "examples/configs/evals/eval.yaml",
    **{kind: f"examples/configs/arithmetic/{kind}.yaml" for kind in ("ppo", "distillation", "dpo", "sft", "rm")},
}


@dataclass(frozen=True)
class Row:
    feature: str
    kind: str  # of run: grpo, sft, ...; "" where the row names files
    overrides: tuple[str, ...]
    works: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The algorithms that the row names."""
        return tuple(re.findall(r"`(\w+)`", self.feature))


def rows() -> list[Row]:
    table = PAGE.split("| feature | configuration | GPU |\n|---|---|---|\n")[1].split("\n\n")[0]
    return [row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in table.splitlines()]


def row(feature: str, configuration: str, gpu: str) -> Row:  # the last is held by test_gpu_claims.py
    words = shlex.split(configuration.strip("`"))
    return Row(feature, *((words[1], tuple(words[2:])) if words[0] == "strop" else ("", ())), not feature.endswith("(not yet)"))


ROWS = rows()
COMMANDS = [found for found in ROWS if found.kind]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, and the data that some of them read."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "examples").symlink_to(ROOT / "examples")
    script = [sys.executable, str(ROOT / "examples/arithmetic_data.py"), "--train", "20", "--validation", "5"]
    subprocess.run(script, cwd=folder, check=True, capture_output=True)
    return folder


def start(found: Row, *more: str, check: bool = True) -> Any:
    """As far as a run gets before it loads a model: its configuration, its environments by name."""
    config = load_config(BASES[found.kind], [*found.overrides, *more], root=RUNS[found.kind], check=check).config
    if check:
        for alias, options in config.env.items() if hasattr(config, "env") else ():
            make_environment(alias, options.options)
    return config


@pytest.mark.parametrize("found", COMMANDS, ids=lambda found: found.feature[:40])
def test_a_row_says_what_the_code_does(found: Row, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    if not found.works:
        with pytest.raises((ConfigError, EnvironmentConfigError)):
            start(found)
        return
    start(found)
    for name in found.names:
        start(found, f"algorithm.name={name}")


def test_every_algorithm_stands_in_the_table_once() -> None:
    named = [name for found in ROWS for name in found.names]
    assert sorted(named) == sorted(all_algorithms())


def test_every_part_that_is_refused_has_a_row(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that arrives loses the rule that says "this version"; its row then fails above."""
    monkeypatch.chdir(workplace)
    missing = refused_parts() - {
        "num_nodes",
        "fp8_cfg.fp8_param",
        "enabled",
    }  # an evaluation on several machines, a detail of FP8, and a draft head with Megatron Core or ranks are no parts
    for found in COMMANDS:
        if not found.works:
            try:
                problems = find_errors(start(found, check=False))
            except ConfigError as error:
                problems = list(error.problems)
            missing -= {problem.key.partition(".")[2].removeprefix("generation.") for problem in problems}
    assert not missing, f"docs/features.md has no row for {missing}"


def refused_parts() -> set[str]:
    """The keys, below their section, of the rules of sections that refuse what is not in this version."""
    calls = [
        [ast.unparse(argument) for argument in node.args]
        for path in (ROOT / "src" / "strop").rglob("*_config.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem"
    ]
    return {key.split("}.")[1].strip("'\"") for key, message, *_ in calls if "this version" in message}


def test_the_readme_is_short_and_begins_with_a_picture_and_the_ways_in() -> None:
    assert len(README.splitlines()) <= 90 and "![" in README.partition("\n## ")[0]
    commands = re.search(r"^```sh\n(.*?)^```", "\n".join(README.splitlines()[:22]), re.DOTALL | re.MULTILINE)
    install = (ROOT / "docs" / "install.md").read_text()
    ways = [line for line in commands[1].splitlines() if not line.startswith("#")] if commands else []
    assert len(ways) == 3 and all(way in install for way in ways)

"""Environments by name, from a module, from a file; and options that are checked."""

from __future__ import annotations

import sys

import pytest

from strop.environments.arithmetic import Arithmetic
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import environment_class, list_environments, make_environment

OUTSIDE = """
from dataclasses import dataclass
from strop.environments.base import DatasetEnvironment, reward

@dataclass(frozen=True, kw_only=True)
class Mine(DatasetEnvironment):
    needed: int
    factor: float = 1.0

    @reward()
    def any(self, task, rollout):
        return self.factor

class Undecorated(DatasetEnvironment):
    option: int = 3

class Other:
    pass
"""


@pytest.mark.parametrize("name", list_environments())
def test_every_registered_name_resolves(name):
    assert environment_class(name).__name__


def test_options_reach_the_dataclass():
    environment = make_environment("arithmetic", {"operators": ["+", "-"], "max_operand": 9})
    assert environment == Arithmetic(operators=("+", "-"), max_operand=9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetik", {}, "did you mean 'arithmetic'.*there are: " + ", ".join(list_environments())),
        ("arithmetic", {"max_operands": 3}, "no option 'max_operands'; did you mean 'max_operand'"),
        ("arithmetic", {"max_operand": "50"}, "max_operand .* is '50': Input should be a valid integer"),
        ("arithmetic", {"max_operand": 5.5}, "valid integer"),
        ("no.such.module:Thing", {}, "importing 'no.such.module' failed"),
        ("strop.types:Task", {}, "not a subclass"),
        ("strop.environments.arithmetic:Arithmetics", {}, "did you mean 'Arithmetic'"),
        ("strop.environments.base:Environment", {}, "does not define tasks"),
    ],
)
def test_what_cannot_be_made_is_an_error_that_helps(name, options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment(name, options)


def test_a_file_is_an_environment(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OUTSIDE)
    environment = make_environment(f"{path}:Mine", {"needed": 2, "factor": 3})
    assert environment.needed == 2 and environment.factor == 3.0
    assert environment_class(f"{path}:Mine") is type(environment)
    with pytest.raises(EnvironmentConfigError, match="not decorated"):
        environment_class(f"{path}:Undecorated")
    with pytest.raises(EnvironmentConfigError, match="not a subclass"):
        environment_class(f"{path}:Other")
    with pytest.raises(EnvironmentConfigError, match="there is no file"):
        environment_class(f"{tmp_path}/missing.py:Mine")


def test_a_module_in_the_current_folder_is_found_and_the_path_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "mine_in_cwd.py").write_text(OUTSIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    assert environment_class("mine_in_cwd:Mine").__name__ == "Mine"
    assert sys.path == before


def test_a_file_that_raises_is_named_with_its_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(EnvironmentConfigError, match=r"broken\.py.*ZeroDivisionError"):
        environment_class(f"{path}:Mine")

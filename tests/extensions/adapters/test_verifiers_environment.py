"""What verifiers' adapter says where it cannot work; ``test_installed_packages.py`` has the package."""

from __future__ import annotations

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment
from strop.extensions.adapters.verifiers_environment import VerifiersEnvironment

ENV = {"taskset": {"id": "reverse-text"}}


def test_an_interpreter_without_verifiers_is_an_error_that_says_what_to_set():
    with pytest.raises(EnvironmentConfigError, match=r"has no verifiers; .* set python to that interpreter"):
        VerifiersEnvironment(env=ENV).tasks(DataSource())


def test_an_interpreter_that_does_not_exist_is_an_error():
    with pytest.raises(EnvironmentConfigError, match="cannot be started"):
        VerifiersEnvironment(env=ENV, python="/nowhere/python").tasks(DataSource())


def test_an_environment_needs_the_name_of_a_task_set():
    with pytest.raises(EnvironmentConfigError, match=r"env.taskset.id is not set"):
        make_environment("verifiers", {"env": {"agent": {}}})

"""The examples of docs/adapters.md: each loads, and its environments are made as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from strop import plugins
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment
from strop.extensions.adapters.verifiers_environment import VerifiersEnvironment

DOC = Path(__file__).parents[3] / "docs" / "adapters.md"
EXAMPLES = dict(re.findall(r"```yaml\n# (\w+)(?:\.yaml)?\n(.*?)```", DOC.read_text(), re.DOTALL))


@pytest.mark.parametrize("name", ["lake", "games", "reasoning"])
def test_the_example_makes_its_environments_and_their_tasks(name):
    for options in yaml.safe_load(EXAMPLES[name])["env"].values():
        environment = make_environment(options.pop("type"), options)
        assert environment.tasks(DataSource(size=3))[2].id


def test_the_example_of_verifiers_has_the_options_of_its_environment():
    (options,) = yaml.safe_load(EXAMPLES["verifiers"])["env"].values()
    assert isinstance(make_environment(options.pop("type"), options), VerifiersEnvironment)


def test_the_example_of_nemo_gym_has_the_options_of_its_environment():
    (options,) = yaml.safe_load(EXAMPLES["nemo_gym"])["env"].values()
    with pytest.raises(EnvironmentConfigError, match="python is 'envs/nemo-gym/bin/python', which cannot be started"):
        make_environment("nemo_gym", options)


def test_every_adapter_is_in_the_table():
    named = re.findall(r"^\| `(\w+)` \|", DOC.read_text(), re.MULTILINE)
    adapters = [name for name, point in plugins.declared("environments").items() if ".adapters." in point.value]
    assert set(adapters) <= set(named)

"""Sections of a configuration are values: they do not change, equal ones are equal, and a copy is made by ``replace``."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from strop.config.schema.grpo_config import GrpoConfig
from strop.config.schema.ppo_config import GaeConfig
from strop.monitoring.logger_config import LoggerConfig


def test_a_section_does_not_change() -> None:
    section = LoggerConfig()
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'log_dir'"):
        section.log_dir = "elsewhere"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'log_dir'"):
        del section.log_dir
    with pytest.raises(FrozenInstanceError):
        section.no_such_key = 1  # type: ignore[attr-defined]
    assert section == LoggerConfig()


def test_sections_of_a_kind_are_equal_where_all_their_values_are() -> None:
    section = GrpoConfig()
    other = replace(section, seed=section.seed + 1)
    assert section == GrpoConfig()
    assert section != other
    assert other == replace(GrpoConfig(), seed=section.seed + 1)
    assert section != LoggerConfig()
    assert section != "grpo"


def test_a_section_survives_pickle_and_says_its_values() -> None:
    section = replace(GrpoConfig(), seed=7)
    assert pickle.loads(pickle.dumps(section)) == section
    assert repr(section).startswith("GrpoConfig(")
    assert "seed=7" in repr(section)
    assert section.seed == 7


def test_sections_without_lists_or_mappings_can_be_keys() -> None:
    assert len({GaeConfig(), GaeConfig(), replace(GaeConfig(), gae_lambda=0.5)}) == 2

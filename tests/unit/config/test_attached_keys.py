"""Keys that an extension puts among those of a section (``strop.keys``)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from strop import plugins
from strop.base_config import BaseConfig
from strop.problems import Problem


class Added(BaseConfig):
    added: int = 3

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        yield Problem(f"{key}.added", "found 3", "Set it to 4.")


class Replacing(Added):
    def _check_size(self) -> str:
        return "theirs"


class Owner(BaseConfig):
    size: int = 1

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        yield Problem(f"{key}.size", self._check_size(), "Set it to 2.")

    def _check_size(self) -> str:
        return "ours"


def attach(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    point = EntryPoint("Whole.added", f"{__name__}:{kind.__name__}", "strop.keys")
    monkeypatch.setattr(plugins, "declared", lambda group: {"Whole.added": point} if group == "keys" else {})


def test_attached_keys_stand_among_those_of_the_section_and_are_checked_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, Added)

    class Whole(Owner):
        pass

    whole = Whole(added=5, size=2)  # type: ignore[call-arg]
    assert Added.of(whole).added == 5
    assert [(problem.key, problem.message) for problem in whole.errors("a")] == [("a.size", "ours"), ("a.added", "found 3")]


def test_attached_keys_may_not_replace_a_check_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, Replacing)
    with pytest.raises(
        TypeError, match=r"Replacing is attached to Whole by strop\.keys, and its _check_size would replace that of Owner"
    ):
        type("Whole", (Owner,), {"__annotations__": {}})

"""Keys and sections that extensions attach to those of the core."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from strop import base_config, plugins
from strop.base_config import BaseConfig, fields_of, iter_sections, to_tree, validate_section
from strop.config.source.keys import role_of
from strop.problems import Problem


class Strength(BaseConfig):
    """Keys of an extension."""

    identity_keys = ("strength",)

    strength: float = 0.0

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        if self.strength > getattr(self, "limit", 0.0):
            yield Problem(f"{key}.strength", "it is too large")


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> type[BaseConfig]:
    attached = {("keys", "Owner"): {"strength": Strength}}
    monkeypatch.setattr(base_config, "_attached", lambda group, name: attached.get((group, name), {}))

    class Owner(BaseConfig):
        """A section of the core."""

        limit: float = 1.0

        def errors(self, key: str) -> Iterator[Problem]:
            yield from super().errors(key)
            yield Problem(f"{key}.limit", "of the owner")

    return Owner


def test_they_are_keys_of_the_owner_and_of_what_inherits_from_it(owner: type[BaseConfig]) -> None:
    class Heir(owner):  # type: ignore[misc, valid-type]
        more: int = 2

    assert set(fields_of(owner)) == {"limit", "strength"}
    heir = validate_section(Heir, {"strength": 0.5, "more": 3})
    assert to_tree(heir) == {"limit": 1.0, "strength": 0.5, "more": 3}
    with pytest.raises(ValueError, match="strength"):
        validate_section(owner, {"strength": "much"})


def test_they_see_the_owners_keys_and_are_checked_with_them(owner: type[BaseConfig]) -> None:
    section = validate_section(owner, {"strength": 2.0})
    assert Strength.of(section) is section and [each for _, each in iter_sections(section)] == [section]
    assert [problem.key for problem in section.errors("a")] == ["a.strength", "a.limit"]
    assert [problem.key for problem in validate_section(owner, {"strength": 1.0}).errors("a")] == ["a.limit"]


def test_they_say_what_a_change_means_to_a_run_that_is_continued(owner: type[BaseConfig]) -> None:
    assert role_of(owner, ["strength"]) == "identity" and role_of(owner, ["limit"]) == "applied"


def test_a_section_without_them_says_so() -> None:
    class Other(BaseConfig):
        limit: float = 1.0

    with pytest.raises(LookupError, match="Other has no section Strength"):
        Strength.of(Other())


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

"""Print the oldest versions that pyproject.toml allows, as constraints of pip: ``python constraints/oldest.py [EXTRA ...]``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def list_oldest(extras: Sequence[str]) -> Iterator[str]:
    """Yield ``name==version`` for the requirements of Strop and of its extras. Raises ValueError for one without a lower bound."""
    for text in [*PROJECT["dependencies"], *(each for extra in extras for each in PROJECT["optional-dependencies"][extra])]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            yield from list_oldest(sorted(requirement.extras))
            continue
        lowest = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
        if not lowest:
            raise ValueError(f"{text} has no lower bound, so no oldest version can be tested")
        yield f"{requirement.name}=={lowest[0]}"


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(list_oldest(sys.argv[1:]))))

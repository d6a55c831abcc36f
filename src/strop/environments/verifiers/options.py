"""Build a configured object from its options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from strop.environments.base import EnvironmentConfigError
from strop.user_code import explain_invalid, suggest_names

T = TypeVar("T")


def build_from_options(kind: type[T], what: str, options: Mapping[str, Any], *, others: Sequence[str] = ()) -> T:
    """Build a dataclass. Raises EnvironmentConfigError for unknown, ill-typed and missing options of ``what``.

    ``others``: further allowed names that are read elsewhere."""
    from pydantic import TypeAdapter, ValidationError

    known = {item.name: item for item in fields(kind) if item.init}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            raise EnvironmentConfigError(f"{what} has no option {option!r}{suggest_names(str(option), (*known, *others))}")
        if types[option] is Any:  # checked by the class itself, and possibly not JSON
            values[option] = value
            continue
        try:  # in JSON mode a list is accepted for a tuple, but "3" is not a number
            values[option] = TypeAdapter(types[option]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = explain_invalid(types[option], value, error)
            raise EnvironmentConfigError(f"the option {option} of {what} is {value!r}: {why}") from error
    for option, item in known.items():
        if option not in values and item.default is MISSING and item.default_factory is MISSING:
            raise EnvironmentConfigError(f"{what} needs the option {option}; set it")
    return kind(**values)

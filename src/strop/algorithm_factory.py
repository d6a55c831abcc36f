"""Make an algorithm from its name and options, as configurations write them, and the other way round."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import partial
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from strop.algorithms.base import Algorithm
from strop.algorithms.catalogue import all_algorithms, all_parts, part_name
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import Part
from strop.user_code import import_attribute, suggest_names


@dataclass(frozen=True)
class AlgorithmSetting:
    """A flat key of a configuration and the field of the algorithm that it sets."""

    key: str  # as written in the configuration
    field: str  # of the algorithm, or ``part.field``
    value: Any


def make_algorithm(name: str, kwargs: Mapping[str, Any], settings: Iterable[AlgorithmSetting] = ()) -> Algorithm:
    """Make the algorithm called ``name``: its own defaults, overridden by ``kwargs``, then by ``settings``.

    Raises ValueError for an unknown name, for an option that neither the algorithm nor its part has, and for a value of the wrong type.
    """
    kind = find_algorithm(name)
    known = {item.name: item for item in fields(kind) if item.init}
    for key in kwargs:
        if key not in known:
            raise ValueError(f"algorithm.kwargs.{key}: {name} has no such field{suggest_names(key, known)}")
    options = {
        key: parse_option(get_type_hints(kind)[key], value, f"algorithm.kwargs.{key}", _default_value(known[key]))
        for key, value in kwargs.items()
    }
    missing = [key for key, item in known.items() if key not in options and _is_required(item)]
    if missing:
        raise ValueError(f"algorithm.kwargs: {name} needs {', '.join(missing)}")
    algorithm: Algorithm = _construct(kind, options, "algorithm.kwargs")
    unused = []
    for setting in settings:
        if ":" in name and setting.field.partition(".")[0] not in known:
            unused += [setting.key] if setting.value else []  # a key that is off asks for nothing
        else:
            algorithm = _apply_setting(algorithm, setting, name)
    if unused:
        effect = "this key has no effect" if len(unused) == 1 else "these keys have no effect"
        warnings.warn(f"algorithm.name: {name} does not use {', '.join(unused)}; {effect}", stacklevel=2)
    return algorithm


def find_algorithm(name: str) -> type[Algorithm]:
    """Return the algorithm class for a file name in ``strop.algorithms`` or for ``module:Class``. Raises ValueError."""
    kind = import_attribute(name) if ":" in name else all_algorithms().get(name)
    if kind is None:
        raise ValueError(
            f"algorithm.name: {name!r} is neither one of Strop's algorithms nor module:Class{suggest_names(name, all_algorithms())}"
        )
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"algorithm.name: {name!r} is not a subclass of strop.algorithms.base.Algorithm")
    if undefined := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ValueError(f"algorithm.name: {name} does not define {', '.join(undefined)}, which every algorithm must define")
    if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
        raise ValueError(f"algorithm.name: {name} has options but is not decorated with @dataclass(frozen=True, kw_only=True)")
    return kind


def format_algorithm(name: str, algorithm: Algorithm) -> str:
    """Format an algorithm and its parts on one line: all options of each part, and the algorithm's own options that differ from their
    defaults."""
    parts = []
    for item in fields(algorithm):
        value = getattr(algorithm, item.name)
        if isinstance(value, Part | Kl):
            parts.append(f"{item.name} {_format_part(value)}")
        elif isinstance(value, tuple) and any(isinstance(part, Part) for part in value):
            parts.append(f"{item.name} {', '.join(_format_part(part) for part in value)}")
        elif value != item.default or item.name == "aggregation":
            parts.append(f"{item.name} {value}")
    return f"{name}: {'; '.join(parts)}" if parts else name


def format_changes(name: str, algorithm: Algorithm) -> str:
    """Format an algorithm by what differs from its own defaults: ``grpo, with objective.high=0.28, kl.weight=0.1``."""
    changes = [
        f"{where}={_format_part(value) if isinstance(value, Part | Kl) else value}"
        for item in fields(algorithm)
        for where, value in _iter_changes(item.name, getattr(algorithm, item.name), _default_value(item))
    ]
    return f"{name}, with {', '.join(changes)}" if changes else name


def _iter_changes(where: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) of what differs: the options of a part of the default's kind, else the part itself."""
    if isinstance(value, Kl) and default is None:  # compared with no term at all
        if value.weight:
            yield f"{where}.weight", value.weight
            yield from _iter_changes(where, value, Kl(weight=value.weight))
        return
    if value == default:
        return
    if isinstance(value, Part | Kl) and type(value) is type(default):
        for item in fields(value):
            yield from _iter_changes(f"{where}.{item.name}", getattr(value, item.name), getattr(default, item.name))
    elif isinstance(value, tuple):
        yield where, "[" + ", ".join(_format_part(part) if isinstance(part, Part) else str(part) for part in value) + "]"
    else:
        yield where, value


def _format_part(part: Part | Kl) -> str:
    options = ", ".join(
        f"{item.name}={getattr(part, item.name)}" for item in fields(part) if getattr(part, item.name) is not None
    )
    kind = part_name(type(part)) if isinstance(part, Part) else part.estimator
    return f"{kind}({options})" if options else kind


def name_options(algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
    """Return the name of an algorithm, and its options as a configuration writes them. Raises ValueError if these make another one."""
    name = next((name for name, kind in all_algorithms().items() if kind is type(algorithm)), _dotted(type(algorithm)))
    options = {item.name: _write_option(getattr(algorithm, item.name)) for item in fields(algorithm) if item.init}
    if make_algorithm(name, options) != algorithm:
        raise ValueError(f"{algorithm!r} has options that a configuration cannot hold; name it as file.py:Class instead")
    return name, options


def _write_option(value: Any) -> Any:
    if isinstance(value, Part):
        known = all_parts()
        name = next((name for name, kind in known.items() if kind is type(value)), _dotted(type(value)))
        return {"name": name, **{item.name: _write_option(getattr(value, item.name)) for item in fields(value)}}
    if isinstance(value, Kl):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    return [_write_option(item) for item in value] if isinstance(value, tuple) else value


def _dotted(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def parse_option(annotation: Any, value: Any, where: str, default: Any = None) -> Any:
    """Convert a YAML value to the type of its field. A part is ``name`` or ``{name: .., option: ..}``; several parts are a list.

    ``default``: the part whose options change where a value names no part.

    Raises ValueError."""
    base, is_list = _find_part_type(annotation)
    if base is None:
        return _parse_plain(annotation, value, where)
    if is_list:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: found {value!r}; give a list of parts, such as [{{name: tis}}]")
        return tuple(_parse_part(base, item, f"{where}.{index}") for index, item in enumerate(value))
    return None if value is None else _parse_part(base, value, where, default)


def _parse_part(base: type, value: Any, where: str, default: Any = None) -> Any:
    """Make a part. Without a name, make the field's default part with other options."""
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}: found {value!r}; give the part's name, or {{name: .., option: ..}}")
    options = dict(options)
    if "name" in options and base is not Kl:
        kind = find_part(base, str(options.pop("name")), where)
        return _construct(kind, _parse_options(kind, options, where), where)
    start = Kl() if default is None and base is Kl else default
    if start is None:
        raise ValueError(f"{where}: name the part{suggest_names('', _parts_of_type(base))}")
    return _replace_fields(start, _parse_options(type(start), options, where, complete=False), where)


def _parse_options(kind: type, options: Mapping[str, Any], where: str, *, complete: bool = True) -> dict[str, Any]:
    """Convert the options of a part to the types of its fields. ``complete``: all options without a default are required.

    Raises ValueError."""
    known = {item.name: item for item in fields(kind)}
    for key in options:
        if key not in known:
            raise ValueError(f"{where}.{key}: {kind.__name__} has no such option{suggest_names(key, known)}")
    missing = [key for key, item in known.items() if complete and key not in options and _is_required(item)]
    if missing:
        raise ValueError(f"{where}: {kind.__name__} needs {', '.join(missing)}")
    hints = get_type_hints(kind)
    return {
        key: parse_option(hints[key], option, f"{where}.{key}", _default_value(known[key])) for key, option in options.items()
    }


def find_part(base: type, name: str, where: str) -> type[Part]:
    """Return the subclass of ``base`` with this name, or the one at ``module:Class``. Raises ValueError."""
    part = import_attribute(name) if ":" in name else _parts_of_type(base).get(name)
    if not (isinstance(part, type) and issubclass(part, base)):
        raise ValueError(f"{where}: {name!r} is not a known {base.__name__.lower()}{suggest_names(name, _parts_of_type(base))}")
    return cast("type[Part]", part)


def _parts_of_type(base: type) -> dict[str, type[Part]]:
    return {name: kind for name, kind in all_parts().items() if issubclass(kind, base)}


def _apply_setting(algorithm: Any, setting: AlgorithmSetting, name: str) -> Any:
    """Return the algorithm with one flat key applied. Raises ValueError if the algorithm, or its part, has no such field."""
    head, _, rest = setting.field.partition(".")
    known = {item.name for item in fields(algorithm)}
    if head not in known:
        if setting.key == f"algorithm.{head}":
            raise ValueError(f"{setting.key}: {name} has no such field{suggest_names(head, [*known, 'name', 'kwargs'])}")
        raise ValueError(
            f"{setting.key}: found {setting.value!r}, but {name} has no {head}. Remove the key, or choose another algorithm.name"
        )
    if not rest:
        hint, current = get_type_hints(type(algorithm))[head], getattr(algorithm, head) or _default_kl(head)
        return _replace_fields(algorithm, {head: parse_option(hint, setting.value, setting.key, current)}, setting.key)
    part = getattr(algorithm, head) or _default_kl(head)
    if part is None or rest not in {item.name for item in fields(part)}:
        kind = "none" if part is None else part_name(type(part)) if isinstance(part, Part) else type(part).__name__
        raise ValueError(
            f"{setting.key}: found {setting.value!r}, but the {head} of {name} is {kind}, which has no option {rest}. Remove the key, or "
            f"choose another {head} (algorithm.kwargs.{head})"
        )
    return _replace_fields(algorithm, {head: _replace_fields(part, {rest: setting.value}, setting.key)}, setting.key)


def _default_kl(field: str) -> Kl | None:
    """Return the KL term of an algorithm without one: a key that only shapes it does not enable it."""
    return Kl(weight=0.0) if field == "kl" else None


def _replace_fields(target: Any, values: Mapping[str, Any], where: str) -> Any:
    return _construct(partial(replace, target), values, where)


def _construct(factory: Callable[..., Any], values: Mapping[str, Any], where: str) -> Any:
    try:
        return factory(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _find_part_type(annotation: Any) -> tuple[type | None, bool]:
    """Return (type of the parts that a field holds, whether it holds several), or (None, False) for a plain value."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for option in options:
        inner = get_args(option)[0] if get_origin(option) is tuple and get_args(option) else option
        if isinstance(inner, type) and (issubclass(inner, Part) or inner is Kl):
            return inner, inner is not option
    return None, False


def _parse_plain(annotation: Any, value: Any, where: str) -> Any:
    """Validate a plain value; a tuple may be written as a YAML list. Raises ValueError for the wrong type."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"{where}: found {value!r}: {error.errors()[0]['msg']}") from error


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _default_value(item: Field[Any]) -> Any:
    return None if item.default is MISSING else item.default

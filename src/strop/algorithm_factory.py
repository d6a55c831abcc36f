"""Create an algorithm from its name and options as written in a configuration, and format one that way.

Names are those of each class of ``strop.algorithms``, named after itself, and those that extensions declare:

    class LitePPO(PolicyGradient)   ->  algorithm.name: lite_ppo
    class SequenceClip(Objective)   ->  {name: sequence_clip}
    name: ClassVar[str] = "maxrl"   ->  that name instead
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import strop.algorithms
from strop import plugins
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import Advantage, Correction, Objective, Part, Selection, Shaping
from strop.user_code import import_attribute, suggest_names

Kind = TypeVar("Kind")
ALGORITHM: Any = Algorithm  # abstract, and so no type[Algorithm] to mypy


@cache
def all_algorithms() -> dict[str, type[Algorithm]]:
    """Return every algorithm of the package, and those that extensions declare, by its name."""
    return dict(sorted({**_by_name(_classes_of(_modules(), ALGORITHM)), **_declared(ALGORITHM)}.items()))


@cache
def find_in_package(name: str) -> type[Algorithm] | None:
    """Return the algorithm with this name; None if there is none. A file of this name is read first, often without the others."""
    if name in plugins.declared("algorithms"):
        return _declared(ALGORITHM, name).get(name)
    own_file = [module for module in _modules() if module.rpartition(".")[2] == name]
    return _by_name(_classes_of(own_file, ALGORITHM)).get(name) or all_algorithms().get(name)


@cache
def all_parts() -> dict[str, type[Part]]:
    """Return every part of the package, and those that extensions declare, by its name."""
    return {**_by_name(kind for kind in _classes_of(_modules(), Part) if kind is not Part), **_declared(Part)}


def _declared(base: type[Kind], *names: str) -> dict[str, type[Kind]]:
    """Return the algorithms or parts among the entry points ``strop.algorithms``: all, or those of some names."""
    kinds = {name: plugins.load("algorithms", name) for name in names or plugins.declared("algorithms")}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, base)}


def name_of(kind: type) -> str:
    """Return the name of an algorithm or part in a configuration: ``name``, or the class name in snake case."""
    return vars(kind).get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def _by_name(kinds: Iterable[type[Kind]]) -> dict[str, type[Kind]]:
    """Return classes by name, in alphabetical order. Raises TypeError if two have one name."""
    found: dict[str, type[Kind]] = {}
    for kind in kinds:
        if (other := found.setdefault(name_of(kind), kind)) is not kind:
            raise TypeError(f"{kind.__module__} and {other.__module__} both define {name_of(kind)!r}")
    return dict(sorted(found.items()))


def _modules() -> list[str]:
    found = (info.name for info in pkgutil.walk_packages(strop.algorithms.__path__, "strop.algorithms.") if not info.ispkg)
    return sorted(name for name in found if name != __name__)


def _classes_of(modules: Iterable[str], base: type[Kind]) -> Iterable[type[Kind]]:
    """Yield the classes that the modules define, without base classes: those are abstract, or have a field without a default."""
    for module in map(importlib.import_module, modules):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__ and not _is_base(kind):
                yield kind


def _is_base(kind: type) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    return inspect.isabstract(kind) or any(field.default is inspect.Parameter.empty for field in parameters)


PART_KEYS: Mapping[type[Part], str] = {  # kind of part -> the configuration key that names one
    Advantage: "algorithm.advantage.name",
    Objective: "algorithm.objective.name",
    Correction: "algorithm.corrections",
    Selection: "algorithm.selection.name",
    Shaping: "algorithm.shaping.name",
}


@dataclass(frozen=True)
class AlgorithmSetting:
    """A flat key of a configuration and the field of the algorithm that it sets."""

    key: str  # as written in the configuration
    field: str  # field of the algorithm, or ``part.field``
    value: Any


@dataclass
class Draft:
    """An algorithm or a part under construction: keys are applied one after another, and the result is validated once."""

    name: str  # as messages call it
    kind: type
    where: str  # the key that chose it
    options: dict[str, Any] = field(default_factory=dict)  # its parts may be drafts, or already created
    keys: dict[str, str] = field(default_factory=dict)  # option -> the key that set it

    @property
    def fields(self) -> dict[str, Field[Any]]:
        return {item.name: item for item in fields(self.kind) if item.init}

    def current(self, option: str) -> Any:
        """Return the current value of an option; None if it has none yet."""
        return self.options.get(option, _default_value(self.fields[option]))

    def set(self, option: str, value: Any, key: str) -> None:
        self.options[option], self.keys[option] = value, key

    def parse(self, option: str, value: Any, where: str, key: str) -> None:
        """Set an option to a YAML value, located at ``where`` within ``key``. Raises ValueError."""
        hint = get_type_hints(self.kind)[option]
        self.set(option, _parse_option(hint, value, where, self.current(option) or _default_kl(option)), key)

    def make(self) -> Any:
        """Create the object and its parts. Raises ValueError at the keys of the options involved."""
        if missing := [name for name, item in self.fields.items() if name not in self.options and _is_required(item)]:
            raise ValueError(f"{self.where}: {self.name} needs {', '.join(missing)}")
        try:
            return self.kind(**{name: _make(value) for name, value in self.options.items()})
        except _RefusedPart:
            raise
        except ValueError as error:
            blamed = [key for option, key in self.keys.items() if re.search(rf"\b{option}\b", str(error))]
            keys = dict.fromkeys(blamed or self.keys.values() or [self.where])
            raise _RefusedPart(f"{', '.join(keys)}: {error}") from error


class _RefusedPart(ValueError):
    """A part rejected its options. The message begins with their keys."""


def make_algorithm(name: str, kwargs: Mapping[str, Any], settings: Iterable[AlgorithmSetting] = ()) -> Algorithm:
    """Make the algorithm called ``name``: its own defaults, overridden by ``kwargs``, then by ``settings``.

    Raises ValueError for an unknown name, an option that neither the algorithm nor its part has, or a value of the wrong type.
    """
    draft = Draft(name, find_algorithm(name), "algorithm.kwargs")
    for key, value in kwargs.items():
        if key not in draft.fields:
            raise ValueError(f"algorithm.kwargs.{key}: {name} has no such field{suggest_names(key, draft.fields)}")
        draft.parse(key, value, f"algorithm.kwargs.{key}", "algorithm.kwargs")
    unused = []
    for setting in settings:
        if ":" in name and setting.field.partition(".")[0] not in draft.fields:
            unused += [setting.key] if setting.value else []  # a disabled key requires nothing
        else:
            _apply_setting(draft, setting)
    if unused:
        effect = "this key has no effect" if len(unused) == 1 else "these keys have no effect"
        warnings.warn(f"algorithm.name: {name} does not use {', '.join(unused)}; {effect}", stacklevel=2)
    algorithm: Algorithm = draft.make()
    return algorithm


def find_algorithm(name: str) -> type[Algorithm]:
    """Return the algorithm class for a file name in ``strop.algorithms`` or for ``module:Class``. Raises ValueError."""
    kind = import_attribute(name) if ":" in name else find_in_package(name)
    if kind is None:
        raise ValueError(
            f"algorithm.name: {name!r} is neither one of Strop's algorithms nor module:Class{suggest_names(name, all_algorithms())}"
        )
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"algorithm.name: {name!r} is not a subclass of strop.algorithms.base.Algorithm{_say_where(kind, name)}")
    if undefined := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ValueError(f"algorithm.name: {name} does not define {', '.join(undefined)}, which every algorithm must define")
    if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
        raise ValueError(f"algorithm.name: {name} has options but is not decorated with @dataclass(frozen=True, kw_only=True)")
    return kind


def format_algorithm(name: str, algorithm: Algorithm) -> str:
    """Format an algorithm and its parts on one line: all options of each part, and the algorithm's own non-default options."""
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
    """Yield (option, value) for each difference: the options of a part of the default's kind, otherwise the whole part."""
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
    kind = name_of(type(part)) if isinstance(part, Part) else part.estimator
    return f"{kind}({options})" if options else kind


def name_options(algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
    """Return the name and options of an algorithm as written in a configuration. Raises ValueError if they would create another
    one.
    """
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


def _parse_option(annotation: Any, value: Any, where: str, current: Any = None) -> Any:
    """Convert a YAML value to the type of its field. A part (``name`` or ``{name: .., option: ..}``) becomes a draft; several
    form a list.

    ``current``: the part whose options change if the value names no part.

    Raises ValueError."""
    base, is_list = _find_part_type(annotation)
    if base is None:
        return _parse_plain(annotation, value, where)
    if is_list:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: found {value!r}; give a list of parts, such as [{{name: tis}}]")
        return tuple(_draft_part(base, item, f"{where}.{index}") for index, item in enumerate(value))
    return None if value is None else _draft_part(base, value, where, current)


def _draft_part(base: type, value: Any, where: str, current: Any = None) -> Draft:
    """Draft a part. Without a name, it is the current part with changed options."""
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}: found {value!r}; give the part's name, or {{name: .., option: ..}}")
    options = dict(options)
    if "name" in options and base is not Kl:
        kind = find_part(base, str(options.pop("name")), where)
        draft = Draft(kind.__name__, kind, where)
    elif current is None and base is not Kl:
        raise ValueError(f"{where}: name the part{suggest_names('', _parts_of_type(base))}")
    else:
        draft = _draft_of(Kl() if current is None else current, where)
    for key, option in options.items():
        if key not in draft.fields:
            raise ValueError(f"{where}.{key}: {draft.name} has no such option{suggest_names(key, draft.fields)}")
        draft.parse(key, option, f"{where}.{key}", where)
    return draft


def _draft_of(part: Any, where: str) -> Draft:
    """Return a part's draft, or a draft that would create the part."""
    if isinstance(part, Draft):
        return part
    draft = Draft(type(part).__name__, type(part), where)
    draft.options.update({name: getattr(part, name) for name in draft.fields})
    return draft


def _make(value: Any) -> Any:
    if isinstance(value, Draft):
        return value.make()
    return tuple(_make(item) for item in value) if isinstance(value, tuple) else value


def find_part(base: type, name: str, where: str) -> type[Part]:
    """Return the subclass of ``base`` with this name, or the one at ``module:Class``. Raises ValueError."""
    part = import_attribute(name) if ":" in name else _parts_of_type(base).get(name)
    if not (isinstance(part, type) and issubclass(part, base)):
        hint = _say_where(part, name) or suggest_names(name, _parts_of_type(base))
        raise ValueError(f"{where}: {name!r} is not a known {base.__name__.lower()}{hint}")
    return cast("type[Part]", part)


def _say_where(kind: object, name: str) -> str:
    """Return where a misplaced class belongs; empty if nowhere."""
    if not isinstance(kind, type) or kind in PART_KEYS or not issubclass(kind, Part | Algorithm):
        return ""
    if issubclass(kind, Algorithm):
        return f". It is an algorithm: set algorithm.name={name}"
    base, key = next((base, key) for base, key in PART_KEYS.items() if issubclass(kind, base))
    value = f"[{{name: {name!r}}}]" if base is Correction else name
    article = "an" if base in (Advantage, Objective) else "a"
    return f". It is {article} {base.__name__.lower()}, a part of an algorithm such as grpo: set {key}={value}"


def _parts_of_type(base: type) -> dict[str, type[Part]]:
    return {name: kind for name, kind in all_parts().items() if issubclass(kind, base)}


def _apply_setting(draft: Draft, setting: AlgorithmSetting) -> None:
    """Apply one flat key. Raises ValueError if the algorithm, or its part, has no such field."""
    (head, _, rest), name = setting.field.partition("."), draft.name
    if head not in draft.fields:
        if setting.key == f"algorithm.{head}":
            raise ValueError(f"{setting.key}: {name} has no such field{suggest_names(head, [*draft.fields, 'name', 'kwargs'])}")
        raise ValueError(
            f"{setting.key}: found {setting.value!r}, but {name} has no {head}. Remove the key, or choose another algorithm.name"
        )
    if not rest:
        return draft.parse(head, setting.value, setting.key, setting.key)
    current = draft.current(head) or _default_kl(head)
    part = None if current is None else _draft_of(current, setting.key)
    if part is None or rest not in part.fields:
        kind = "none" if part is None else name_of(part.kind) if issubclass(part.kind, Part) else part.name
        raise ValueError(
            f"{setting.key}: found {setting.value!r}, but the {head} of {name} is {kind}, which has no option {rest}. Remove the key, or "
            f"choose another {head} (algorithm.kwargs.{head})"
        )
    part.set(rest, setting.value, setting.key)
    draft.set(head, part, setting.key)


def _default_kl(field: str) -> Kl | None:
    """Return the KL term of an algorithm without one: a key that only shapes it does not enable it."""
    return Kl(weight=0.0) if field == "kl" else None


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

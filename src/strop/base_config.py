"""The base class of every section of a configuration: a frozen dataclass that pydantic validates.

Sections are defined next to the code that reads them. A key may *follow* another: ``max_new_tokens`` follows
``..max_total_sequence_length`` and takes its value unless it is set (null counts as not set). Targets are written as in
interpolations: one dot is the same section, two dots the parent section.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, CoreSchema

from strop import plugins
from strop.problems import Problem

KeyPath = tuple[str, ...]


def expand_home(value: str) -> str:
    """Return a path with ``~`` or ``~user`` expanded to the home folder; any other text is returned unchanged."""
    return os.path.expanduser(value) if value.startswith("~") else value


# A folder, a file, or a name that may be one (a model, data or code).
PathText = Annotated[str, AfterValidator(expand_home)]


def _reject_float16(value: object) -> object:
    if value in ("float16", "fp16", "half"):
        raise ValueError("float16 needs loss scaling, which is not in this version; set bfloat16 or float32")
    return value


Precision = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_reject_float16)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", examples=["auto", "cpu", "cuda", "cuda:1"])]


def _write_texts(variables: object) -> object:
    """Convert numbers and switches to the strings that a process receives."""
    if not isinstance(variables, Mapping):
        return {} if variables is None else variables
    return {
        name: "" if value is None else str(value) if isinstance(value, bool | int | float) else value
        for name, value in variables.items()
    }


EnvironmentVariables = Annotated[dict[str, str], BeforeValidator(_write_texts)]


# ``json_schema_extra`` of a key whose file may be in the folder of the configuration that names it (``strop.config.source.interpolation``).
NAMES_FILE: dict[str, Any] = {"names_file": True}


SectionT = TypeVar("SectionT", bound="BaseConfig")


def follows(target: str, *, standalone: Any, description: str, **limits: Any) -> Any:
    """Declare a field whose default is another key's value.

    ``standalone`` is the default in a section that is built on its own; ``...`` makes the key required there.
    """
    return Field(default=standalone, description=description, json_schema_extra={"follows": [target]}, **limits)


def sets(option: str, default: Any, *, description: str, **limits: Any) -> Any:
    """Declare a field that is an alias for an option of the algorithm: ``objective.high`` is the key
    ``algorithm.objective.high``.

    The default leaves the option unchanged.
    """
    return Field(default=default, description=description, json_schema_extra={"sets": option}, **limits)


def subsection(model: type[BaseConfig]) -> Any:
    """Declare a field that is a section."""
    return Field(default_factory=model)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field, follows, sets, subsection))
class BaseConfig:
    """A section. Subclasses become frozen, keyword-only dataclasses whose values are validated; unknown keys are errors."""

    # Effect of a changed key on a resumed run (``strop.config.source.keys``): identity keys must not change, unrelated keys have no
    # effect on it, and all others apply from the next step on; "*" stands for every key of the section itself.
    identity_keys: ClassVar[tuple[str, ...]] = ()
    unrelated_keys: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if keys := tuple(_attached("keys", cls.__name__).values()):
            _refuse_private_names(cls, keys)
            cls.__bases__ = (*keys, *cls.__bases__)  # before the dataclass collects the fields of its bases
        for name, model in _attached("sections", cls.__name__).items():
            cls.__annotations__[name] = model
            setattr(cls, name, subsection(model))
        # The methods below replace the generated ones of dataclasses, which would be compiled for every class when `strop`
        # starts.
        dataclass(
            cls,
            repr=False,
            eq=False,
            kw_only=True,
            config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(_values(self)))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _field_names(cast("Any", type(self))))
        return f"{type(self).__qualname__}({values})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        inner: Any = schema
        while inner["type"] != "dataclass":
            inner = inner["schema"]
        inner["strict"] = False  # a mapping may stand for a section, although its values are validated strictly
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_null_sections(cls, values: Any) -> Any:
        """Read a null section (``logger:`` with nothing under it) as a section with no key set."""
        values = values.kwargs or {} if isinstance(values, ArgsKwargs) else values
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if value is not None or not is_section(cls, name)}

    @classmethod
    def of(cls: type[SectionT], owner: BaseConfig) -> SectionT:
        """Return the section of this class that an extension has attached to ``owner``: ``owner`` itself if it has the keys.

        Raises LookupError.
        """
        if isinstance(owner, cls):
            return owner
        for name, field in fields_of(type(owner)).items():
            model = section_model(field)
            if model is not None and issubclass(model, cls):
                section: SectionT = getattr(owner, name)
                return section
        raise LookupError(f"{type(owner).__name__} has no section {cls.__name__}")

    def errors(self, key: str) -> Iterator[Problem]:
        """Yield the errors within this section, whose dotted key is ``key``."""
        return iter(())

    def warnings(self, key: str) -> Iterator[Problem]:
        """Yield warnings about settings in this section (dotted key ``key``) that work, but perhaps not as intended."""
        return iter(())

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        """Yield what cannot work in this section, which is at the dotted ``key``, together with the rest of ``config``."""
        return iter(())

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield what cannot work on this machine, after a look at what this section names: code, programs, files.

        ``environments``: those that this process is to hold (``strop.environments.handle.LocalEnvironment``), by alias."""
        return iter(())

    def warnings_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        """Yield what works in this section together with the rest of ``config``, but perhaps not as intended."""
        return iter(())


def _attached(group: str, owner: str) -> dict[str, type[BaseConfig]]:
    """Return what extensions attach to the class ``owner``, by entry points ``OWNER.NAME``.

    Those of the group ``strop.sections`` become sections under the key NAME; the keys of those of ``strop.keys`` stand among the owner's,
    which inherits from them.
    """
    prefix = f"{owner}."
    names = [name for name in plugins.declared(group) if name.startswith(prefix)]
    return {name.removeprefix(prefix): plugins.load(group, name) for name in names}


def _refuse_private_names(owner: type, attached: tuple[type, ...]) -> None:
    """Raise TypeError where a class that ``owner`` is to inherit from would replace a private method of it, or of another one."""
    for kind in attached:
        others = {base for each in (owner, *attached) if each is not kind for base in each.__mro__} - {*kind.__mro__}
        taken = {name: base.__name__ for base in others for name in vars(base)}
        for name in vars(kind):
            if name.startswith("_") and not name.startswith("__") and name in taken:
                raise TypeError(
                    f"{kind.__module__}:{kind.__name__} is attached to {owner.__name__} by strop.keys, and its {name} would replace "
                    f"that of {taken[name]}: give it another name"
                )


def _values(section: Any) -> list[Any]:
    return [getattr(section, name) for name in _field_names(cast("Any", type(section)))]


@cache
def _field_names(model: type[BaseConfig]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast("Any", model)))


def fields_of(model: type[BaseConfig]) -> dict[str, FieldInfo]:
    """Return the fields of a section by name."""
    return getattr(model, "__pydantic_fields__", {})


def section_model(field: FieldInfo) -> type[BaseConfig] | None:
    """Return the model of a field that is a section; None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseConfig) else None


def is_section(model: type[BaseConfig], name: str) -> bool:
    return name in fields_of(model) and section_model(fields_of(model)[name]) is not None


def followed_keys(field: FieldInfo) -> tuple[str, ...]:
    """Return the targets of a field that follows other keys, as written; empty for other fields."""
    extra = field.json_schema_extra
    return tuple(cast("list[str]", extra["follows"])) if isinstance(extra, dict) and "follows" in extra else ()


def option_set_by(field: FieldInfo) -> str | None:
    """Return the option of the algorithm that a field sets, such as ``objective.high``; None for other fields."""
    extra = field.json_schema_extra
    return str(extra["sets"]) if isinstance(extra, dict) and "sets" in extra else None


def iter_sections(section: BaseConfig, key: str = "") -> Iterator[tuple[str, BaseConfig]]:
    """Yield (dotted key, section) of a section and every section inside it, outermost first; the root's key is "".

    Includes entries of mappings and lists: ``teachers.NAME``, ``data.train.0``, or ``data.train`` for the only entry of a list.
    """
    yield key, section
    for name in _field_names(cast("Any", type(section))):
        entries = getattr(section, name)
        if type(entries) in PLAIN:
            continue
        inner_key = f"{key}.{name}" if key else name
        for entry_key, value in _entries(inner_key, entries):
            if isinstance(value, BaseConfig):
                yield from iter_sections(value, entry_key)


PLAIN = frozenset({bool, int, float, str, type(None)})  # types of values that contain no section


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{key}.{name}", entry) for name, entry in value.items())
    elif isinstance(value, tuple) and len(value) > 1:
        yield from ((f"{key}.{index}", entry) for index, entry in enumerate(value))
    else:
        yield key, value[0] if isinstance(value, tuple) and value else value


def changed_keys(key: str, section: BaseConfig, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """Return the keys under ``section`` that differ from their default, except ``ignore`` and keys that follow another."""
    changed: list[str] = []
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, BaseConfig):
            changed += changed_keys(f"{key}.{name}", value)
        elif name not in ignore and not followed_keys(field) and value != default_of(section, name):
            changed.append(f"{key}.{name}")
    return changed


def default_of(section: BaseConfig, name: str) -> Any:
    return default_of_field(fields_of(type(section))[name])


def default_of_field(field: FieldInfo) -> Any:
    """Return the default of a field. Unlike pydantic's ``get_default``, it does not inspect the factory's signature on each call."""
    make = cast("Callable[[], Any] | None", field.default_factory)
    return field.get_default() if make is None else make()


def to_tree(section: BaseConfig, *, mode: Literal["python", "json"] = "json") -> dict[str, Any]:
    """Return the values of a section as nested dicts, as they would be written in YAML."""
    tree: dict[str, Any] = _adapter(type(section)).dump_python(section, mode=mode)
    return tree


def to_json(section: BaseConfig) -> str:
    return _adapter(type(section)).dump_json(section).decode()


def validate_section(model: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """Return the section with these values, which may be nested mappings. Raises pydantic's ValidationError."""
    validated: SectionT = _adapter(model).validate_python(values)
    return validated


def _adapter(model: type[BaseConfig]) -> TypeAdapter[Any]:
    """Return pydantic's validator of a section. Creating it takes longer than validating a configuration."""
    if model not in _ADAPTERS:
        _ADAPTERS[model] = TypeAdapter(model)
    return _ADAPTERS[model]


_ADAPTERS: dict[type[BaseConfig], TypeAdapter[Any]] = {}

"""The tool options of every environment, and typed Python functions as tools: schema from signature and docstring, result as text."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import MISSING, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, get_type_hints

from strop import plugins
from strop.tools.base import Tool, ToolConfigError, ToolError, ToolSet
from strop.tools.toolbox import Toolbox, ToolLimits, open_toolbox
from strop.user_code import UserCodeError, describe_value, explain_invalid, import_attribute, suggest_names

_GOOGLE = re.compile(r"^(Args|Arguments|Parameters|Params):\s*$")
_NUMPY = re.compile(r"^(Parameters|Other Parameters)\s*$")
_SPHINX = re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\**(\w+)\s*:\s*(.*)$")
_SECTION = re.compile(r"^(Returns?|Yields?|Raises|Examples?|Notes?|See Also|Warnings?|Attributes|References|Todo):?\s*$")
_GOOGLE_ITEM = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY_ITEM = re.compile(r"^\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")


@dataclass
class DocumentedFunction:
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> DocumentedFunction:
    """Return the description, up to the first section, and the description of each parameter."""
    documented = DocumentedFunction()
    lines = inspect.cleandoc(text or "").splitlines()
    description: list[str] = []
    index, ended = 0, False
    while index < len(lines):
        line = lines[index]
        underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[index + 1].strip()) is not None
        if sphinx := _SPHINX.match(line):
            index = _read_sphinx(lines, index, sphinx, documented)
        elif underlined and _NUMPY.match(line):
            index = _read_items(lines, index + 2, documented, numpy=True)
        elif _GOOGLE.match(line):
            index = _read_items(lines, index + 1, documented, numpy=False)
        else:
            ended = ended or underlined or _SECTION.match(line) is not None or line.startswith(":")
            description += [] if ended else [line]
            index += 1
            continue
        ended = True
    documented.description = "\n".join(description).strip()
    return documented


def _read_sphinx(lines: list[str], index: int, match: re.Match[str], documented: DocumentedFunction) -> int:
    texts = [match[2]]
    index += 1
    while index < len(lines) and lines[index].strip() and not lines[index].startswith(":"):
        texts.append(lines[index].strip())
        index += 1
    documented.parameters[match[1]] = " ".join(texts).strip()
    return index


def _read_items(lines: list[str], index: int, documented: DocumentedFunction, *, numpy: bool) -> int:
    """Read the parameters from line ``index`` on, and return the line where they end. Continuation lines are indented below their
    item.
    """
    names: list[str] = []
    indent = 0
    while index < len(lines):
        line = lines[index]
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            index += 1
            continue
        if not numpy and depth == 0:  # the section is over
            return index
        if numpy and depth == 0 and index + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[index + 1].strip()):
            return index
        item = (_NUMPY_ITEM if numpy else _GOOGLE_ITEM).match(line.strip())
        if item and (depth == 0 if numpy else not names or depth <= indent):
            names, indent = [name.strip() for name in item[1].split(",")], depth
            documented.parameters.update(dict.fromkeys(names, "" if numpy else item[2]))
        for name in names if not (item and depth == indent) else ():
            documented.parameters[name] = f"{documented.parameters[name]} {line.strip()}".strip()
        index += 1
    return index


_SHOWN_PROBLEMS = 5


def make_tool(function: Callable[..., Any], *, name: str | None = None, description: str | None = None) -> Tool:
    """Create a tool from a function, plain or async. Raises ToolConfigError if its arguments cannot be described as JSON.

    Types of parameters may be what JSON has, ``Literal``, ``Optional``, enums, dataclasses, and lists and dicts of those. A parameter is
    described by its docstring, or by ``Annotated[int, "what it is"]``. The function's result is shown to the policy: text
    unchanged, data as JSON.
    """
    title = str(name or getattr(function, "__name__", type(function).__name__))
    documented = read_docstring(inspect.getdoc(function) if inspect.isroutine(function) else inspect.getdoc(type(function)))
    model, names = _make_model(function, title, documented.parameters)

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return _check_arguments(model, names, arguments)

    async def call_async(**arguments: Any) -> str:
        return format_result(await function(**check(arguments)))

    def call(**arguments: Any) -> str:
        return format_result(function(**check(arguments)))

    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return Tool(
        name=title,
        description=description or documented.description,
        parameters=_clean_schema(model.model_json_schema(by_alias=True)),
        function=call_async if inspect.iscoroutinefunction(target) else call,
    )


def _make_model(function: Callable[..., Any], title: str, described: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """Return a pydantic model of a function's arguments, and the parameter of each field, since some names are not allowed as
    fields.
    """
    from pydantic import ConfigDict, Field, create_model

    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        hints = get_type_hints(target, include_extras=True)
    except Exception as error:
        raise ToolConfigError(f"the types of the tool {title} cannot be resolved: {error}") from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolConfigError(
                f"the tool {title} has the parameter {parameter}; parameters of tools are given by name, each with a type"
            )
        if parameter.name not in hints:
            raise ToolConfigError(f"the parameter {parameter.name} of the tool {title} has no type; write {parameter.name}: TYPE")
        hint = hints[parameter.name]
        notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str)]
        said = next(iter(notes), described.get(parameter.name))
        default = ... if parameter.default is parameter.empty else parameter.default
        options: dict[str, Any] = {"alias": parameter.name} | ({"description": said} if said else {})
        fields[f"argument_{number}"] = (hint, Field(default, **options))
        names[f"argument_{number}"] = parameter.name
    try:
        model = create_model(title, __config__=ConfigDict(extra="forbid", strict=True), **fields)
        model.model_json_schema(by_alias=True)
    except Exception as error:  # pydantic raises several kinds of errors for types that it cannot describe
        why = str(error).partition("\n")[0]
        raise ToolConfigError(f"the tool {title} has a parameter whose type cannot be written as JSON: {why}") from error
    return model, names


def _check_arguments(model: Any, names: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the function's types. Raises ToolError with all problems."""
    from pydantic import ValidationError

    try:
        checked = model.model_validate_json(json.dumps(arguments), strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg'].lower()}"
            + ("" if each["type"] in ("missing", "extra_forbidden") else f", found {describe_value(each['input'])}")
            for each in error.errors()[:_SHOWN_PROBLEMS]
        ]
        raise ToolError(f"the arguments do not fit the schema: {'; '.join(problems)}") from None
    return {name: getattr(checked, field) for field, name in names.items() if field in checked.model_fields_set}


def format_result(value: Any) -> str:
    """Return a tool's result as text: text unchanged, data as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_to_data)


def _to_data(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _clean_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in the form for chat templates: without titles, and with definitions inlined."""
    definitions = schema.get("$defs", {})

    def clean(value: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(value, list):
            return [clean(each, inside) for each in value]
        if not isinstance(value, Mapping):
            return value
        name = str(value.get("$ref", "")).rpartition("/")[2]
        if name in inside:
            return {"type": "object"}  # a recursive type is described once
        if name:
            return clean({**definitions[name], **{key: each for key, each in value.items() if key != "$ref"}}, (*inside, name))
        result = {}
        for key, each in value.items():
            if key == "properties":
                result[key] = {property: clean(inner, inside) for property, inner in each.items()}
            elif (
                key == "$defs" or (key == "title" and isinstance(each, str)) or (key == "additionalProperties" and each is False)
            ):
                continue
            else:
                result[key] = clean(each, inside)
        return result

    return {"type": "object", "properties": {}, **clean(schema)}


@dataclass(frozen=True)
class SingleTool:
    """A tool without state between calls."""

    tool: Tool

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        @asynccontextmanager
        async def opened() -> Any:
            yield (self.tool,)

        return opened()


def make_tool_sets(tools: Any) -> tuple[tuple[str, ToolSet], ...]:
    """Return the tool sets in a list, each with its name. Raises ToolConfigError.

    An item is a name (``python``), a function (``file.py:function``, ``module:function``), or one of these with options
    (``{search: {corpus: notes.jsonl}}``); in Python also a function, a ``Tool`` or a ``ToolSet`` itself.
    """
    items = [tools] if isinstance(tools, str | Mapping | Tool) or callable(tools) or hasattr(tools, "open") else tools
    if not isinstance(items, Sequence):
        raise ToolConfigError(f"tools is {tools!r:.80}, not a list of tools")
    return tuple(_make_set(item) for item in items)


def _make_set(item: Any) -> tuple[str, ToolSet]:
    if isinstance(item, Mapping):
        if len(item) != 1 or not isinstance(options := next(iter(item.values())), Mapping | None):
            raise ToolConfigError(f"tools has the item {item!r:.120}; a tool with options is written {{NAME: {{OPTION: VALUE}}}}")
        return _make_named(str(next(iter(item))), options or {})
    if isinstance(item, str):
        return _make_named(item, {})
    return _wrap(item, getattr(item, "__name__", type(item).__name__), {})


def _make_named(name: str, options: Mapping[str, Any]) -> tuple[str, ToolSet]:
    path = plugins.find_path("tools", name) or name
    if ":" not in path:
        raise ToolConfigError(
            f"there is no tool {name!r}{suggest_names(name, plugins.declared('tools'))}; name your own as file.py:function"
        )
    try:
        found = import_attribute(path)
    except UserCodeError as error:
        raise ToolConfigError(f"tools: {error}") from error
    return _wrap(found, name, options)


def _wrap(found: Any, name: str, options: Mapping[str, Any]) -> tuple[str, ToolSet]:
    """Return a tool set for a named object: a tool set class, a tool set, a tool, or a function."""
    title = name.rpartition(":")[2]
    if isinstance(found, type) and hasattr(found, "open"):
        return title, _build(found, name, options)
    if options:
        raise ToolConfigError(f"the tool {name} takes no options; remove {', '.join(sorted(options))}")
    if isinstance(found, Tool):
        return title, SingleTool(found)
    if hasattr(found, "open"):
        return title, found
    if not callable(found) or isinstance(found, type):
        raise ToolConfigError(f"{name} is {found!r:.80}, which is no function, no Tool and no ToolSet")
    return title, SingleTool(make_tool(found))


def _build(kind: type, name: str, options: Mapping[str, Any]) -> ToolSet:
    """Build a tool set, a dataclass whose fields are its options."""
    from pydantic import TypeAdapter, ValidationError

    known = {each.name: each for each in dataclasses.fields(kind) if each.init} if dataclasses.is_dataclass(kind) else {}
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            raise ToolConfigError(f"the tool {name} has no option {option!r}{suggest_names(option, known)}")
        try:
            values[option] = TypeAdapter(types[option]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = explain_invalid(types[option], value, error)
            raise ToolConfigError(f"the option {option} of the tool {name} is {value!r:.120}: {why}") from error
    for option, each in known.items():
        if option not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ToolConfigError(f"the tool {name} needs the option {option}; write {{{name}: {{{option}: ...}}}}")
    try:
        built: ToolSet = kind(**values)
    except (TypeError, ValueError) as error:
        raise ToolConfigError(f"the tool {name}: {error}") from error
    return built


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The tools available to the policy in an episode, and limits on their use."""

    tools: Any = ()  # names, functions as file.py:function, and {NAME: {OPTION: VALUE}}
    max_tool_calls: int | None = None  # per episode; None: as many as fit
    tool_timeout_s: float = 60.0  # for one call
    parallel_tool_calls: bool = True  # whether a turn may have several calls, which run concurrently
    at_tool_limit: Literal["tell", "end"] = "tell"  # a call beyond max_tool_calls is reported to the policy, or ends the episode
    max_tool_result: int = 20_000  # characters of a result; the middle of a longer one is left out
    tool_continuation: Literal["turn", "message"] = (
        "turn"  # after a call: a tool message and a new turn, or a continuation of the same message
    )

    @cached_property
    def tool_sets(self) -> tuple[tuple[str, ToolSet], ...]:
        """The sets of tools by name. Raises ToolConfigError."""
        return make_tool_sets(self.tools)

    @property
    def has_tools(self) -> bool:
        return bool(self.tool_sets)

    def open_tools(self) -> AbstractAsyncContextManager[Toolbox]:
        limits = ToolLimits(
            max_calls=self.max_tool_calls,
            timeout_s=self.tool_timeout_s,
            parallel=self.parallel_tool_calls,
            max_result=self.max_tool_result,
            at_limit=self.at_tool_limit,
        )
        return open_toolbox(self.tool_sets, limits, self.tool_continuation)

    def check_tool_options(self) -> None:
        """Raise ToolConfigError for invalid tools and limits."""
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise ToolConfigError(f"max_tool_calls is {self.max_tool_calls}; set it to at least 1, or tools to [] for none")
        if self.tool_timeout_s <= 0:
            raise ToolConfigError(f"tool_timeout_s is {self.tool_timeout_s:g}; set it to seconds above 0")
        if self.max_tool_result < 100:
            raise ToolConfigError(f"max_tool_result is {self.max_tool_result}; set it to at least 100 characters")
        _ = self.tool_sets

"""Load a configuration from YAML files and overrides, or raise one error that lists every problem.

files + overrides -> words of other libraries translated -> defaults of the schema -> interpolation -> schema -> checks across keys
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from strop.base_config import (
    BaseConfig,
    KeyPath,
    fields_of,
    followed_keys,
    option_set_by,
    section_model,
    to_tree,
    validate_section,
)
from strop.config import cluster_checks, run_checks
from strop.config.load.device_defaults import resolve_auto_backend
from strop.config.load.recipe_library import explain_key, translate_source
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig, GrpoRunConfig, TrainingRunConfig
from strop.config.source import keys, yaml_text
from strop.config.source.interpolation import (
    UNSET_VARIABLE,
    escape_interpolations,
    find_named_files,
    iter_targets,
    name_run,
    referenced_keys,
    resolve_source,
)
from strop.config.source.keys import find_nearest_keys, suggest_keys
from strop.config.source.yaml_source import (
    ConfigSource,
    apply_overrides,
    copy_values,
    delete_key,
    describe_type,
    get_at,
    iter_values,
    read_config_file,
    without_key,
)
from strop.problems import ConfigError, Origin, Problem
from strop.safety.printable import REDACTED, redact_secrets


@dataclass(frozen=True)
class RemovedKey:
    pattern: str  # of dotted keys, as in ``fnmatch``
    default: Any  # the value of a run that did not set it, which has no effect
    instead: str


_REPLAY = (
    "Remove it: asynchronous runs no longer repeat bit by bit. Train synchronously for a run that does; `strop replay` recomputes a step "
    "of any run from its stored rollouts."
)

REMOVED_KEYS = (
    RemovedKey("*.async_*.repeatable", False, _REPLAY),
    RemovedKey("*.async_*.answer_delay", 0, _REPLAY),
    RemovedKey("*.async_*.record_events", False, _REPLAY),
    RemovedKey("*.async_*.replay_events", None, _REPLAY),
    RemovedKey(
        "*.weight_loading", "direct", "Remove it: the processes that hold the model always receive the weights themselves."
    ),
)


def drop_removed_keys(source: ConfigSource) -> tuple[ConfigSource, list[Problem]]:
    """Return the source without removed keys, and a problem for each that has an effect."""
    problems = []
    for path in list(source.origins):
        removed = next((each for each in REMOVED_KEYS if fnmatchcase(".".join(path), each.pattern)), None)
        if removed is None:
            continue
        if (value := get_at(source.values, path)) != removed.default:
            message = f"found {value!r}, and this key is gone"
            problems.append(Problem(".".join(path), message, removed.instead, source.origins[path]))
        _, source = delete_key(source, path, source.origins[path])
    return source, problems


ConfigT = TypeVar("ConfigT", bound=BaseConfig)


@dataclass(frozen=True)
class LoadedConfig(Generic[ConfigT]):
    """A valid configuration with its warnings and sources."""

    config: ConfigT
    warnings: tuple[Problem, ...]
    files: tuple[Path, ...]  # the file and all files it inherits from, base first
    overrides: tuple[str, ...]
    differences: tuple[Any, ...] = ()  # differences in meaning from other libraries' keys
    source: ConfigSource = field(default_factory=ConfigSource)  # the translated settings, with their ${...}


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    root: type[ConfigT],
    values: Mapping[str, Any] | None = None,
    check: bool = True,
    has_gpus: bool | None = None,
) -> LoadedConfig[ConfigT]:
    """Load and validate a configuration: a file, then ``values`` (nested, from Python), then overrides.

    ``check=False`` skips the checks across keys, files and packages, to read a saved run.

    Raises ConfigError, which lists every problem found.
    """
    source = ConfigSource() if path is None else read_config_file(Path(path))
    refuse_other_kind(source, path, root)
    return load_source(
        source.overlay(ConfigSource.from_python(values or {})), overrides, root=root, check=check, has_gpus=has_gpus
    )


def load_source(
    source: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    root: type[ConfigT],
    check: bool = True,
    has_gpus: bool | None = None,
) -> LoadedConfig[ConfigT]:
    """Load and validate what was read of a configuration, with overrides. Raises ConfigError, which lists every problem found."""
    source, problems = apply_overrides(source, overrides, root)
    if open_values := find_missing_values(source):
        raise ConfigError(problems + open_values)
    if not source.values and problems:
        raise ConfigError(problems)  # such as a file without --config, which would make everything required appear missing
    source, removed = drop_removed_keys(source)
    source, unnamed = name_run(source, overrides)
    source, contradictions = resolve_synonyms(source, root)
    translation = translate_source(source, root)
    source, warnings = find_named_files(translation.source, root), list(translation.warnings)
    config, invalid = validate_source(source, root)
    invalid = [problem for problem in invalid if not translation.explains(problem.key)]
    problems += unnamed + contradictions + [*translation.problems] + invalid + ([] if invalid else find_infinite_numbers(source))
    problems += [*removed, *find_left_out(source)] if check else []
    if config is not None and check and len(problems) == len(translation.problems):
        config = resolve_auto_backend(config, has_gpus=has_gpus)
        errors = [problem for problem in run_checks.find_errors(config) if not translation.explains(problem.key)]
        problems += [_with_origin(problem, source) for problem in errors]
    if config is None or problems:
        raise ConfigError(drop_consequences(problems, source, root))
    if check:
        warnings += [_with_origin(problem, source) for problem in run_checks.find_warnings(config)]
    return LoadedConfig(config, tuple(warnings), source.files, tuple(overrides), translation.differences, source)


def drop_consequences(problems: Sequence[Problem], source: ConfigSource, root: type[BaseConfig]) -> list[Problem]:
    """Return the problems without mere consequences: those of keys whose ``${...}`` refers, perhaps indirectly, to a key with its
    own problem, or to a misspelled key.
    """
    wrong = {tuple(problem.key.split(".")) for problem in problems if problem.key}
    unknown = [path for path in wrong if keys.find_field(root, path) is None and path in source.origins]
    wrong |= {tuple(meant.split(".")) for path in unknown for meant in find_nearest_keys(path, root)[:1]}
    followed = {path: _find_followed(path, source) for path in wrong}

    def is_consequence(path: KeyPath) -> bool:
        return any(
            _overlap(target, cause) and not any(_overlap(path, back) for back in followed[cause])  # a cycle has no first element
            for target in followed.get(path, ())
            for cause in wrong - {path}
        )

    return [problem for problem in problems if not is_consequence(tuple(problem.key.split(".")))]


def _find_followed(path: KeyPath, source: ConfigSource) -> set[KeyPath]:
    """Return the paths that a key refers to, directly or indirectly."""
    found: set[KeyPath] = set()
    todo = [path]
    while todo:
        here = todo.pop()
        value = get_at(source.values, here)
        targets = set(iter_targets(here, value)) if isinstance(value, str) else set()
        todo += targets - found
        found |= targets
    return found


def _overlap(path: KeyPath, other: KeyPath) -> bool:
    """Return whether two paths are one, or one is inside the other."""
    length = min(len(path), len(other))
    return path[:length] == other[:length]


def refuse_other_kind(source: ConfigSource, path: Path | str | None, root: type[BaseConfig]) -> None:
    """Raise ConfigError for another command's file: it has that command's section but not this one's."""
    own = getattr(root, "section", "eval")
    kinds = [kind for kind in (*TRAINING_RUNS, "eval") if kind in source.values]
    if len(kinds) == 1 and own != kinds[0]:
        message = f"{path} is a configuration of `strop {kinds[0]}`: it has a section {kinds[0]}, and none of `strop {own}`"
        raise ConfigError([Problem("", message, f"Start strop {kinds[0]} --config {path}, or name a file with a section {own}.")])


def find_missing_values(source: ConfigSource) -> list[Problem]:
    """Return a problem for each value that a file leaves open for its heirs, as ``???``."""
    return [
        Problem(
            key := ".".join(path), "found ???: the file leaves this value open", f"Set it: {key}=...", source.find_origin(path)
        )
        for path, value in iter_values(source.values)
        if value == "???"
    ]


def find_left_out(source: ConfigSource) -> list[Problem]:
    """Return a problem for each value that a run's own config.yaml omits because it may be a secret."""
    return [
        Problem(
            ".".join(path),
            f"found {value}: the files of a run leave out the values of env_vars and the logins of URLs",
            "Set it again, for instance to ${env:NAME}, or remove the key.",
            source.find_origin(path),
        )
        for path, value in iter_values(source.values)
        if isinstance(value, str) and REDACTED in value
    ]


def find_infinite_numbers(source: ConfigSource) -> list[Problem]:
    """Return a problem for each infinite number or NaN among options without a schema, such as an optimizer's."""
    return [
        _describe_infinite(path, value, source)
        for path, value in iter_values(source.values)
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _describe_infinite(path: KeyPath, value: float, source: ConfigSource) -> Problem:
    return Problem(".".join(path), f"found {value}, with which nothing can be computed", FINITE_HINT, source.find_origin(path))


FINITE_HINT = "Set a finite number; for no limit, use null or leave the key out."


def dump_config(config: BaseConfig) -> str:
    """Return YAML that loads back to an equal configuration, except for omitted values: env_vars and logins of URLs."""
    return yaml_text.dump(escape_values(redact_secrets(to_tree(config, mode="python"))))


def escape_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: escape_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escape_values(inner) for inner in value]
    return escape_interpolations(value) if isinstance(value, str) else value


def resolve_synonyms(source: ConfigSource, root: type[BaseConfig]) -> tuple[ConfigSource, list[Problem]]:
    """Keep one of two keys that set the same option of the algorithm: the later file's, or the command line's.

    Return a problem for each pair that one file, or the command line, sets to different values.
    """
    problems: list[Problem] = []
    for key, synonym in _synonyms(cast("Any", root)):
        if not (synonym in source.origins and key.path in source.origins):
            continue
        values = [get_at(source.values, path) for path in (key.path, synonym)]
        layers = [source.layer_of(path) for path in (key.path, synonym)]
        if layers[0] == layers[1] and values[0] != values[1]:
            message = f"found {values[0]!r}, and {'.'.join(synonym)}, another name of the same option, is {values[1]!r}"
            problems.append(Problem(key.dotted, message, "Remove one of them.", source.find_origin(key.path)))
        loser = key.path if layers[0] <= layers[1] else synonym
        source = ConfigSource(without_key(source.values, loser), source.origins, source.files)
    return source, problems


@cache
def _synonyms(root: type[BaseConfig]) -> tuple[tuple[keys.SchemaKey, KeyPath], ...]:
    """Return every key that is another name of an option of the algorithm, and that option."""
    options = ((key, option_set_by(key.field)) for key in keys.iter_keys(root))
    return tuple((key, ("algorithm", *option.split("."))) for key, option in options if option)


def validate_source(source: ConfigSource, root: type[ConfigT]) -> tuple[ConfigT | None, list[Problem]]:
    """Return the configuration (None if it is invalid) and the problems of single keys."""
    shared, unresolved = resolve_source(source, root)
    resolved = copy_values(shared)
    problems = [
        Problem(".".join(path), reason, _suggest_target(source, path, reason, root), source.find_origin(path))
        for path, reason in unresolved.items()
        if path in source.origins
    ]
    for path in unresolved:
        _remove(resolved, path)
    try:
        return validate_section(root, resolved), problems
    except ValidationError as error:
        errors = [(_user_path(item["loc"], source), item) for item in error.errors()]
        reported = [pair for pair in errors if pair[0] not in unresolved and _is_written(pair[0], pair[1]["type"], source, root)]
        reported = _keep_innermost(reported, unresolved) or ([] if problems else errors)
        unknown = [path for path, item in reported if item["type"] == UNKNOWN]
        misspelled = {near for path in unknown for near in find_nearest_keys(path, root)[:1]}
        reported = [(path, item) for path, item in reported if item["type"] != "missing" or ".".join(path) not in misspelled]
        described = [describe_error(path, item, source, root) for path, item in reported]
        return None, problems + list(dict.fromkeys(described))


UNKNOWN = "unexpected_keyword_argument"  # pydantic's error type for an unknown key
ALTERNATIVE = re.compile(r"bool|int|float|str|(literal|list|tuple|dict|constrained|nullable)[\[-].*")  # error types of unions


def _keep_innermost(errors: Sequence[tuple[KeyPath, Any]], unresolved: Collection[KeyPath]) -> list[tuple[KeyPath, Any]]:
    """Return the first error of each key, without errors of enclosing values: a list is wrong because its entry is."""
    first: dict[KeyPath, Any] = {}
    for path, item in errors:
        first.setdefault(path, item)
    wrong = {path[:length] for path in (*first, *unresolved) for length in range(len(path))}
    return [(path, item) for path, item in first.items() if path not in wrong]


def _remove(tree: Any, path: KeyPath) -> None:
    for name in path[:-1]:
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    if isinstance(tree, dict):
        tree.pop(path[-1], None)


def _user_path(location: Sequence[str | int], source: ConfigSource) -> KeyPath:
    """Return the path of a pydantic error as the user wrote it: no index for a single entry, no stages for a scheduler."""
    path = [str(part) for part in location]
    if path[:2] == ["policy", "scheduler"]:
        path = [part for part in path if part not in ("stages", "milestones")]
    path = path[:-1] if path and ALTERNATIVE.fullmatch(path[-1]) else path
    without_numbers = tuple(part for part in path if not part.isdigit())
    return without_numbers if without_numbers in source.origins else tuple(path)


def _is_written(path: KeyPath, error: str, source: ConfigSource, root: type[BaseConfig]) -> bool:
    """Return whether an error is in a value that the user wrote, rather than in its copy under a key that follows."""
    if error == "missing":
        field = keys.find_field(root, path)
        return len(path) > 1 and (field is None or not followed_keys(field))
    return path in source.origins or path[:2] == ("policy", "scheduler")


def _explain_unknown(path: KeyPath, value: Any, root: type[BaseConfig]) -> str:
    """Return what may be meant by an unknown key: one of Strop's, or of another library's."""
    kind: str | None = getattr(root, "section", None)
    near = find_nearest_keys(path, root)
    if kind is not None and len(path) <= 2 and not near and (explained := explain_key(kind, path[-1], value)):
        return explained
    hint = " If it is a section of an extension, install the package that brings it."
    return suggest_keys(path, root) + (hint if isinstance(value, Mapping) and not near else "")


def describe_error(path: KeyPath, item: Any, source: ConfigSource, root: type[BaseConfig]) -> Problem:
    """Turn an error of pydantic into a Problem."""
    dotted, origin, field = ".".join(path), source.find_origin(path), keys.find_field(root, path)
    if item["type"] == UNKNOWN:
        scheduler = (
            "A scheduler has name and kwargs; a list of them ends in {milestones: [...]}."
            if path[:2] == ("policy", "scheduler")
            else ""
        )
        return Problem(dotted, "there is no such key", scheduler or _explain_unknown(path, item["input"], root), origin)
    if item["type"] == "missing":
        suffix = f": {_lower_first(field.description)}" if field is not None and field.description else ""
        return Problem(
            dotted,
            "this key is required" + suffix,
            f"Write {dotted}=... on the command line, or set it in the file named by --config.",
            origin or (Origin(source.files[-1]) if source.files else None),
        )
    value, meaning = item["input"], f"{dotted}: {field.description}" if field is not None and field.description else ""
    if item["type"] == "value_error":
        found = f"found {value!r}: " if isinstance(value, str | int | float | None) else ""
        return Problem(dotted, f"{found}{item['ctx']['error']}", meaning, origin)
    if item["type"] == "dataclass_type" and field is not None and (inner := section_model(field)):
        names = ", ".join(fields_of(inner))
        return Problem(dotted, f"found {value!r}; this is a section, which needs keys under it", f"Its keys: {names}.", origin)
    if isinstance(value, float) and not math.isfinite(value):
        return _describe_infinite(path, value, source)
    if item["type"] == "string_pattern_mismatch" and field is not None:
        return Problem(
            dotted, f"found {value!r}; it must be written like {', '.join(map(str, field.examples or ()))}", meaning, origin
        )
    expected = keys.format_type(field) if field is not None and not path[-1].isdigit() else _lower_first(item["msg"])
    quotes = " Put it in quotes." if item["type"] == "string_type" and isinstance(value, bool | int | float) else ""
    return Problem(
        dotted, f"found {value!r} ({describe_type(value)}); it must be {expected}.{quotes}".rstrip("."), meaning, origin
    )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _suggest_target(source: ConfigSource, path: KeyPath, reason: str, root: type[BaseConfig]) -> str:
    """Suggest a variable to export, or the nearest key for an interpolation of an unknown key."""
    if UNSET_VARIABLE in reason:
        variable = reason.partition(f"{UNSET_VARIABLE} ")[2].split()[0]
        return f"Run export {variable}=..., or write a default: ${{oc.env:{variable},DEFAULT}}."
    value = get_at(source.values, path)
    names = referenced_keys(value) if isinstance(value, str) else ()
    missing = [target for target in names if keys.find_field(root, tuple(target.split("."))) is None]
    nearest = [key for target in missing for key in find_nearest_keys(target.split("."), root)[:1]]
    return f"Did you mean ${{{nearest[0]}}}?" if nearest else ""


def _with_origin(problem: Problem, source: ConfigSource) -> Problem:
    return Problem(problem.key, problem.message, problem.fix, source.find_origin(tuple(problem.key.split("."))))


MODEL_KEY, PLACEHOLDER_MODEL = "policy.model_name", "none"  # the schema requires a model


def find_training_root(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> type[TrainingRunConfig]:
    """Return the kind of training whose section a file or an override has; by default GRPO's."""
    sections = [*values, *(override.lstrip("~+").split(".")[0] for override in overrides)]
    return next((TRAINING_RUNS[section] for section in sections if section in TRAINING_RUNS), GrpoRunConfig)


def load_any_kind(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig[TrainingRunConfig]:
    """Load a training configuration of any kind. Without a file, check only settings of the machines. Raises ConfigError."""
    values = dict(read_config_file(path).values) if path is not None else {}
    root = find_training_root(values, overrides)
    if path is not None:
        return load_config(path, overrides, root=root)
    placeholder = (
        [] if any(override.startswith(f"{MODEL_KEY}=") for override in overrides) else [f"{MODEL_KEY}={PLACEHOLDER_MODEL}"]
    )
    loaded = load_config(None, [*overrides, *placeholder], root=root, check=False)
    problems = cluster_checks.find_machine_errors(loaded.config)
    if problems:
        raise ConfigError(problems)
    return loaded


def load_training_or_evaluation(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig[Any]:
    """Load the configuration of an evaluation (with the section ``eval``) or of training. Raises ConfigError."""
    is_evaluation = "eval" in read_config_file(path).values
    return load_config(path, overrides, root=EvalRunConfig) if is_evaluation else load_any_kind(path, overrides)

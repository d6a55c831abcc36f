"""Verifiers with a pattern of the user: a regular expression or a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.scoring.scoring_pool import get_scoring_pool
from strop.environments.verifiers.base import AnswerVerifier, Reply, Score, read_path
from strop.packages import install_command, is_here, is_installed
from strop.storage.files import read_text_file
from strop.types import Task

SCORERS = "strop.extensions.verifiers.pattern_scorers"
FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


@dataclass(frozen=True, kw_only=True)
class PatternVerifier(AnswerVerifier):
    """1 if the pattern matches, or the number of matches. A match that takes too long gives 0 and counts as ``unverified``."""

    pattern: str  # in Python's re syntax; {answer} is the reference answer as literal text
    match: Literal["search", "fullmatch", "count"] = "search"
    flags: str = ""  # of i, m, s and x
    at_most: int | None = None  # of match=count: a larger number counts as 0, so that repetition gains nothing
    negate: bool = False  # 1 if it does not match
    num_workers: int = 4  # processes of the scoring pool
    timeout_s: float = 1.0  # CPU seconds for one reply

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern.replace("{answer}", ""), self._flags())
        except (re.error, KeyError) as error:
            raise EnvironmentConfigError(
                f"the pattern {self.pattern!r:.200} with flags {self.flags!r} is no regular expression: {error}; flags are i, m, s and x"
            ) from error
        if self.negate and self.match == "count":
            raise EnvironmentConfigError("negate is set, and match is count; set match to search or fullmatch")
        if self.at_most is not None and self.match != "count":
            raise EnvironmentConfigError(
                f"at_most is {self.at_most}, and match is {self.match}; set match to count, or leave it out"
            )
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError(
                f"num_workers is {self.num_workers} and timeout_s is {self.timeout_s}; both must be positive"
            )

    def _flags(self) -> int:
        return int(sum(FLAGS[flag] for flag in set(self.flags)))

    async def score(self, task: Task, reply: Reply) -> Score:
        text = self.read(reply)
        if text is None:
            return Score(0.0, {"unverified": 0.0})
        pattern = self.pattern.replace("{answer}", f"(?:{re.escape(task.answer)})")
        arguments: dict[str, Any] = {"pattern": pattern, "flags": self._flags(), "match": self.match, "text": text}
        found = await get_scoring_pool(self.num_workers).call(
            "pattern", self.timeout_s, loader=f"{SCORERS}:load_pattern", **arguments
        )
        if found.value is None:
            return Score(0.0, {"unverified": 1.0})
        count = 0.0 if self.at_most is not None and found.value > self.at_most else found.value
        return Score(1.0 - count if self.negate else count, {"unverified": 0.0})


_FENCED = re.compile(r"^[ \t]*```[ \t]*(?:json)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class JsonSchemaVerifier(AnswerVerifier):
    """1 if the answer is one JSON document that is valid under the schema. Answers that cannot be checked get 0 and count as
    ``unverified``.
    """

    json_schema: dict[str, Any] | None = None  # the schema itself, of any draft, given by its $schema (default: the newest)
    schema_file: str | None = None
    schema_key: str | None = None  # the column of the rows that holds the schema, as a mapping or as JSON
    fenced: bool = True  # read the last block between ``` fences, if there is one
    credit: Literal["all", "parsed"] = "all"  # parsed: 0.5 for JSON that is not valid under the schema
    num_workers: int = 4  # processes of the scoring pool
    timeout_s: float = 2.0  # CPU seconds for one reply

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.json_schema, self.schema_file, self.schema_key)) != 1:
            raise EnvironmentConfigError(
                "the verifier json_schema needs one of json_schema, schema_file and schema_key; set one of them"
            )
        if not is_installed("jsonschema"):
            raise EnvironmentConfigError(f"the verifier json_schema needs the package jsonschema: {install_command('verifiers')}")
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError(
                f"num_workers is {self.num_workers} and timeout_s is {self.timeout_s}; both must be positive"
            )
        if self.schema_key is None and is_here("jsonschema"):
            check_schema(self._schema)

    @cached_property
    def _schema(self) -> Any:
        if self.schema_file is None:
            return self.json_schema
        try:
            return json.loads(read_text_file(self.schema_file))
        except (OSError, ValueError) as error:
            raise EnvironmentConfigError(f"schema_file {self.schema_file} cannot be read: {error}") from error

    async def score(self, task: Task, reply: Reply) -> Score:
        schema = self._schema if self.schema_key is None else _read_schema(task, self.schema_key)
        text = self.read(reply)
        if text is None:
            return Score(0.0, {"unverified": 0.0})
        if self.fenced and (blocks := _FENCED.findall(text)):
            text = blocks[-1]
        arguments = {"schema": json.dumps(schema, sort_keys=True), "text": text}
        checked = await get_scoring_pool(self.num_workers).call(
            "json_schema", self.timeout_s, loader=f"{SCORERS}:load_json_schema", **arguments
        )
        if checked.value is None:
            return Score(0.0, {"unverified": 1.0})
        return Score(checked.value if self.credit == "parsed" else float(checked.value == 1.0), {"unverified": 0.0})


def _read_schema(task: Task, key: str) -> Any:
    schema = read_path(task.metadata, key)
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, Mapping | bool):
        raise ValueError(
            f"the task {task.id!r} has no JSON schema in its column {key!r}; set schema_key to the column that has one"
        )
    return schema


def check_schema(schema: Any) -> None:
    """Raise EnvironmentConfigError for an invalid schema."""
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except (jsonschema.SchemaError, TypeError, AttributeError) as error:
        why = error.message if isinstance(error, jsonschema.SchemaError) else str(error)
        raise EnvironmentConfigError(f"json_schema is no JSON schema: {why}") from error

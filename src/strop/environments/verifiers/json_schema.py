"""JSON that follows a schema, checked in the scoring pool, because documents can nest deeply and schema patterns can run forever."""

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
        checked = await get_scoring_pool(self.num_workers).call("json_schema", self.timeout_s, **arguments)
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

"""Digests of tasks, here and in another process, which reads a request from its input (``python -m`` this module).

The other process has other hash seeds, other global random states, and asks in reverse order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

from strop.environments.base import Environment
from strop.environments.handle import read_prompt
from strop.types import Task

SECONDS = 300  # that the other process may need
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest_task(environment: Environment[Any], task: Task) -> str:
    """Return a digest of everything in a task and of its prompt."""
    messages = [message.as_dict() for message in read_prompt(environment, task)]
    return hashlib.sha256(repr((_canonical(task), _canonical(messages))).encode(errors="surrogatepass")).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    """Return nested tuples of plain values that do not depend on the order of sets or on addresses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *((item.name, _canonical(getattr(value, item.name))) for item in dataclasses.fields(value)))
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _canonical(inner)) for key, inner in value.items()), key=repr))
    if isinstance(value, Set):
        return tuple(sorted((_canonical(inner) for inner in value), key=repr))
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    if isinstance(value, Sequence):
        return tuple(_canonical(inner) for inner in value)
    if hasattr(value, "tolist"):
        return _canonical(value.tolist())
    return _ADDRESS.sub("", repr(value))


def digest_in_another_process(
    kind: str, config: Mapping[str, Any], indices: Mapping[str, Sequence[int]]
) -> dict[str, list[str]] | str:
    """Return the digests by alias, in the order of the indices; or why there are none.

    ``kind`` is that of the run (``grpo``, ..., ``eval``), ``config`` its values, ``indices`` those of training tasks by alias.
    """
    request = {"kind": kind, "config": config, "indices": indices}
    variables = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "strop.extensions.checks.environments.task_digests"],
            input=json.dumps(request).encode(),
            capture_output=True,
            env=variables,
            timeout=SECONDS,
        )
    except (subprocess.TimeoutExpired, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode or not lines:
        said = done.stderr.decode(errors="replace").strip()
        return said.splitlines()[-1][:300] if said else "it ended without a word"
    digests: dict[str, list[str]] = json.loads(lines[-1])
    return digests


def _digest(request: Mapping[str, Any]) -> dict[str, list[str]]:
    from strop.base_config import validate_section
    from strop.extensions.checks.environments.checked_environments import CHECKED_RUNS, make_checked_environments

    config = validate_section(CHECKED_RUNS[request["kind"]], request["config"])
    random.seed(987654321)
    found: dict[str, list[str]] = {}
    for each in make_checked_environments(config):
        indices = request["indices"].get(each.name)
        if indices is None:
            continue
        reverse = {index: digest_task(each.environment, each.tasks[index]) for index in reversed(indices)}
        found[each.name] = [reverse[index] for index in indices]
    return found


def main() -> None:
    request = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # an environment may print
    digests = _digest(request)
    print(json.dumps(digests), file=output)


if __name__ == "__main__":
    main()

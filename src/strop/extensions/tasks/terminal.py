"""Terminal tasks: folders of Harbor (task.toml, instruction.md) and of Terminal-Bench (task.yaml), read as they are.

    task.toml or task.yaml; instruction.md; environment/Dockerfile; tests/test.sh, which writes /logs/verifier/reward.txt (Terminal-Bench:
    run-tests.sh, whose exit code 0 is the reward 1); solution/solve.sh

The image is ``docker_image`` of task.toml, or ``images`` of the configuration. Without one, a Dockerfile that has only FROM, COPY, ADD of
files, WORKDIR, ENV and LABEL is followed in the environment's ``image``. The tests get the folder of WORKDIR (``test_folder``) in a second
sandbox.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import basename, join, normpath
from random import Random
from typing import Any

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import GeneratedTasks, PromptedTask
from strop.extensions.sandboxes.base import FailureCause, Sandbox, SandboxFailure
from strop.extensions.sandboxes.task_sandbox import GradedInSandbox, SandboxAgent, SandboxEnvironment
from strop.extensions.sandboxes.trees import read_file
from strop.extensions.tasks.base import MACHINE, AgentTasks, make_task, prompted
from strop.extensions.tasks.tiny_tasks import make_folder
from strop.types import Rollout, ToolCall

LOGS = "/logs/verifier"
_IGNORED = {"FROM", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL"}
Files = Mapping[str, str]  # by their paths in a task's folder


@dataclass(frozen=True, kw_only=True)
class TerminalTasks(AgentTasks, GradedInSandbox):
    """How task folders are read and judged, for tools and for agents."""

    image: str | None = MACHINE
    folder: str | None = None  # a task folder, or one of task folders; null: tiny tasks
    images: Mapping[str, str] = field(default_factory=dict)  # prebuilt images by the name of a task, or a pattern such as "*"

    def make(self, index: int, random: Random) -> PromptedTask:
        name, files = make_folder(index, random)
        return self.read(name, files)

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        if self.folder is None:
            return super().tasks(data)
        folders, template = find_folders(Path(self.folder))[: data.size], data.load_template()

        def make(index: int) -> PromptedTask:
            return prompted(self.read(folders[index].name, read_folder(folders[index])), template)

        for index in range(len(folders)):
            make(index)  # report now what cannot run, and keep no files
        return GeneratedTasks(len(folders), make)

    def read(self, name: str, files: Files) -> PromptedTask:
        """Return the task of a folder. Raises DataError for one that cannot run, with the reason."""
        settings = read_settings(name, files)
        place = settings.get("environment") or {}
        image = place.get("docker_image") or next((each for key, each in self.images.items() if fnmatchcase(name, key)), None)
        columns: dict[str, Any] = {"image": image} if image else follow_dockerfile(name, files)
        script = next((path for path in ("tests/test.sh", "tests/run-tests.sh", "run-tests.sh") if path in files), None)
        if script is None:
            raise DataError(f"the task {name} has no tests/test.sh")
        solution = files.get("solution/solve.sh") or files.get("solution.sh")
        limit = (settings.get("verifier") or {}).get("timeout_sec") or settings.get("max_test_timeout_sec")
        return make_task(
            name,
            settings["instruction"],
            **columns,
            test_timeout_s=float(limit) if limit else None,
            test_files={f"/{path}": text for path, text in files.items() if path.startswith("tests/")}
            | {f"/{script}": files[script]},
            test_command=f"mkdir -p {LOGS}; export TEST_DIR=/tests; {find_shell(files[script])} /{script}",
            writes_reward=basename(script) == "test.sh",
            solution=[ToolCall("shell", {"command": f"{find_shell(solution)} -c {shlex.quote(solution)}"})] if solution else (),
        )

    async def judge(self, task: PromptedTask, rollout: Rollout, fresh: Sandbox, folder: str) -> float:
        result = await self.run_tests(task, rollout, fresh, folder)
        return await read_reward(fresh) if task.metadata.get("writes_reward") else float(result.succeeded)


@dataclass(frozen=True, kw_only=True)
class TerminalEnvironment(TerminalTasks, SandboxEnvironment):
    """``type: terminal``: the policy works by the tool ``shell``."""

    tools: Any = ("shell",)


@dataclass(frozen=True, kw_only=True)
class TerminalAgent(TerminalTasks, SandboxAgent):
    """``type: terminal_agent``: an agent inside the sandbox does the task."""


def find_shell(script: str) -> str:
    return "bash" if "bash" in script.partition("\n")[0] else "sh"


async def read_reward(sandbox: Sandbox) -> float:
    """Return the reward that the tests have written, 0 if there is none. Raises SandboxFailure."""
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await read_file(sandbox, f"{LOGS}/{name}", 1)).decode("utf-8", "replace")
            found = json.loads(text)
            reward = float(found["reward"] if isinstance(found, dict) else found)
            return reward if math.isfinite(reward) else 0.0
        except SandboxFailure as failure:
            if failure.cause != FailureCause.REQUEST:
                raise
        except (ValueError, TypeError, LookupError, RecursionError):
            return 0.0
    return 0.0


def find_folders(folder: Path) -> list[Path]:
    """Return the task folders at or below a folder, by name. Raises DataError if there are none."""
    found = sorted(path.parent for name in ("task.toml", "task.yaml") for path in folder.rglob(name))
    if not found:
        raise DataError(f"{folder} has no task folder: no task.toml or task.yaml in it or below")
    return found


def read_folder(folder: Path) -> Files:
    """Return the files of a task folder. Symbolic links are left out."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    texts = {path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8", "surrogateescape") for path in paths}
    programs = [path.relative_to(folder).as_posix() for path in paths if os.access(path, os.X_OK)]
    return {**texts, ".programs": json.dumps(programs)}


def read_settings(name: str, files: Files) -> Mapping[str, Any]:
    """Return the settings of a task, with its instruction. Raises DataError."""
    try:
        if "task.toml" in files:
            settings = tomllib.loads(files["task.toml"])
            lines = files["instruction.md"].splitlines(keepends=True)
            return {**settings, "instruction": "".join(line for line in lines if "canary" not in line.lower()).strip()}
        import yaml

        settings = yaml.safe_load(files["task.yaml"])
        return {**settings, "instruction": str(settings["instruction"]).strip()}
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"the task {name} cannot be read: {error!r}; it needs task.toml and instruction.md, or task.yaml"
        ) from error


def follow_dockerfile(name: str, files: Files) -> dict[str, Any]:
    """Return the columns that do what a Dockerfile does. Raises DataError for instructions that need a build."""
    base = "environment/" if "environment/Dockerfile" in files else ""
    programs = set(json.loads(files.get(".programs", "[]")))
    folder, copied, setup, environment = "", dict[str, str](), list[str](), dict[str, str]()
    for word, rest in split_dockerfile(files.get(f"{base}Dockerfile", "")):
        if word == "WORKDIR":
            folder = join(folder or "/", rest)
        elif word == "ENV":
            pairs = (
                [each.partition("=")[::2] for each in shlex.split(rest)] if "=" in rest.split(" ")[0] else [rest.split(None, 1)]
            )
            environment |= {key: value.strip() for key, value in pairs}
        elif word in ("COPY", "ADD") and "--from" not in rest and "://" not in rest:
            *sources, target = [each for each in shlex.split(rest) if not each.startswith("--")]
            for source in sources:
                for path, where in list_copied(files, base, source, join(folder or "/", target), many=len(sources) > 1):
                    copied[where] = files[path]
                    setup += [f"chmod +x {shlex.quote(where)}"] if path in programs else []
        elif word not in _IGNORED:
            raise DataError(
                f"the task {name} needs an image that is built: its Dockerfile has {word} {rest:.60}. Build it and set "
                f"env.ALIAS.images={{{name}: IMAGE}}"
            )
    return {"folder": folder or "/app", "files": copied, "environment": environment, "setup_command": "\n".join(setup)}


def split_dockerfile(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def list_copied(files: Files, base: str, source: str, target: str, *, many: bool) -> Iterator[tuple[str, str]]:
    """Yield the files that ``COPY source target`` copies, each with its path in the image."""
    source = normpath(source)
    folder = base if source == "." else f"{base}{source}/"
    inside = [path for path in files if path.startswith(folder) and path != f"{base}Dockerfile" and not path.startswith(".")]
    single = [path for path in files if fnmatchcase(path, f"{base}{source}")]
    for path in single or inside:
        if single and not (many or target.endswith("/") or target.endswith("/.") or len(single) > 1):
            yield path, normpath(target)
        else:
            yield path, normpath(join(target, basename(path) if single else path.removeprefix(folder)))

"""Software engineering: a repository, an issue, and hidden tests that judge the repository in a second sandbox.

Rows of SWE-bench (2310.06770), SWE-rebench (2505.20411), R2E-Gym (2504.07164) and others are read by their columns: ``problem_statement``;
``docker_image``, ``image_name`` or ``image`` (for SWE-bench derived from ``instance_id``); and either FAIL_TO_PASS, PASS_TO_PASS and
``test_patch``, or ``expected_output_json``. The image has the repository at the base commit.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from posixpath import basename, dirname
from random import Random
from typing import Any, Literal

from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed
from strop.environments.base import PromptedTask
from strop.extensions.sandboxes.base import FailureCause, Sandbox, SandboxCommand, SandboxFailure
from strop.extensions.sandboxes.task_sandbox import GradedInSandbox, SandboxAgent, SandboxEnvironment
from strop.extensions.sandboxes.trees import check_tree, read_file, write_files
from strop.extensions.tasks.base import MACHINE, AgentTasks, read_inside
from strop.extensions.tasks.tiny_tasks import make_repository
from strop.types import Rollout

# What is never taken from the episode: tests, their configuration, what Python runs by itself, and installed packages.
PROTECTED = (
    ".git", ".venv", "conftest.py", "test_*.py", "*_test.py", "tests.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml",
    "sitecustomize.py", "usercustomize.py", "*.pth", "run_tests.sh", "r2e_tests",
)  # fmt: skip
HERE = "/strop"  # of the second sandbox: what reports outcomes
_PYTHON = 'for bin in "$PWD/.venv/bin" /opt/miniconda3/envs/testbed/bin; do [ -x "$bin/python" ] && PATH="$bin:$PATH"; done; export PATH; '
_APPLY = "git apply --whitespace=nowarn {0} 2>/dev/null || patch -p1 --batch --forward --fuzz=0 -i {0} || exit 1; "
_PATCHED = re.compile(r"^(?:---|\+\+\+) [ab]/(\S+)", re.MULTILINE)
_BLOCK = re.compile(r"^```(?:diff|patch)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class SoftwareTasks(AgentTasks, GradedInSandbox):
    """How repositories are read and judged, for tools and for agents."""

    image: str | None = MACHINE
    folder: str = "/testbed"  # of the repository in images
    submit: Literal["folder", "patch"] = "folder"  # the state of the folder, or a ```diff block in the last message
    protected: Sequence[str] = PROTECTED  # names of files and folders of which the tests get the image's

    def make(self, index: int, random: Random) -> PromptedTask:
        return make_repository(index)

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        return super().tasks(data if data.input_key else replace(data, input_key="problem_statement"))

    def adapt(self, task: PromptedTask) -> PromptedTask:
        row = {name.lower(): value for name, value in task.metadata.items()}
        columns = {"folder": self.folder, "image": find_image(row)} | read_tests(row, self.folder)
        return replace(task, metadata={**task.metadata, **{name: value for name, value in columns.items() if value}})

    def check_gradable(self, task: PromptedTask) -> None:
        if not task.metadata.get("expected"):
            why = "its row has no FAIL_TO_PASS of pytest (FILE::TEST) and no expected_output_json"
            raise RolloutFailed(f"task {task.id!r} cannot be judged: {why}", Ending.BROKEN_TASK)

    def _find_protected(self, task: PromptedTask) -> tuple[str, ...]:
        return (*self.protected, *_PATCHED.findall(str(task.metadata.get("test_patch") or "")))

    async def collect_work(self, task: PromptedTask, rollout: Rollout, used: Sandbox, folder: str) -> bytes:
        if self.submit == "patch":
            await apply_patch(used, folder, rollout.content)
        protected = self._find_protected(task)
        excluded = [f"--exclude={name if '/' not in name else f'{basename(folder)}/{name}'}" for name in protected]
        argv = ("tar", *excluded, "-cf", "-", basename(folder))
        command = SandboxCommand(argv=argv, cwd=dirname(folder) or "/", wall_s=300.0, output_kb=self.max_test_mb << 10)
        result = await used.exec(command)
        if not result.succeeded:
            raise SandboxFailure(FailureCause.REQUEST, f"the folder {folder} cannot be read: {result.stderr[-300:]!r}")
        return leave_out(check_tree(result.stdout, basename(folder)), protected)

    async def place_work(self, fresh: Sandbox, folder: str, archive: bytes) -> None:
        kept = [word for name in self.protected for word in ("-o", "-name", name)][1:]
        argv = (
            "find",
            folder,
            "-mindepth",
            "1",
            "(",
            *kept,
            ")",
            "-prune",
            "-o",
            "!",
            "-type",
            "d",
            "-exec",
            "rm",
            "-f",
            "{}",
            "+",
        )
        await fresh.exec(SandboxCommand(argv=argv, cwd="/"))
        await fresh.put_tree(dirname(folder) or "/", archive)

    async def judge(self, task: PromptedTask, rollout: Rollout, fresh: Sandbox, folder: str) -> float:
        secret = secrets.token_hex(16)
        files = {"strop_report.py": read_inside("strop_report.py"), "secret": secret.encode(), "results": b""}
        files["test.patch"] = str(task.metadata.get("test_patch") or "").encode()
        await write_files(fresh, {f"{HERE}/{name}": content for name, content in files.items()}, mode=0o666)
        await self.run_tests(task, rollout, fresh, folder)
        try:
            results = await read_file(fresh, f"{HERE}/results")
        except SandboxFailure as failure:
            if failure.cause != FailureCause.REQUEST:
                raise
            return 0.0  # the policy's code removed it
        found = read_outcomes(results.decode("utf-8", "replace"), secret)
        expected: Mapping[str, str] = task.metadata["expected"]
        right = sum(matches(found, name, outcome) for name, outcome in expected.items())
        rollout.metrics["tests_passed"] = right / len(expected)
        return float(right == len(expected))


@dataclass(frozen=True, kw_only=True)
class SoftwareEnvironment(SoftwareTasks, SandboxEnvironment):
    """``type: software``: the policy works on a repository by the tool ``shell``."""

    tools: Any = ("shell",)


@dataclass(frozen=True, kw_only=True)
class SoftwareAgent(SoftwareTasks, SandboxAgent):
    """``type: software_agent``: an agent inside the sandbox works on a repository."""


def find_image(row: Mapping[str, Any]) -> str | None:
    """Return the image of a row, with a registry; of SWE-bench's rows, which have none, by the name that its authors publish it under."""
    image = row.get("docker_image") or row.get("image_name") or row.get("image")
    if not image and "environment_setup_commit" in row:
        image = f"swebench/sweb.eval.x86_64.{str(row['instance_id']).lower().replace('__', '_1776_')}:latest"
    if not image:
        return None
    host = str(image).partition("/")[0]
    return str(image) if "." in host or ":" in host else f"docker.io/{image}"


def read_tests(row: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the columns that say how a row is judged: ``expected`` (outcomes by test), ``test_command``, ``remove``."""
    reporting = f'export PYTHONPATH="{HERE}:$PYTHONPATH" PYTEST_ADDOPTS="-p strop_report"; {_PYTHON}'
    if row.get("expected_output_json"):  # R2E-Gym: the image has its hidden tests, and run_tests.sh
        expected = {str(name): str(outcome) for name, outcome in json.loads(row["expected_output_json"]).items()}
        link = "[ -e r2e_tests ] || ln -s $(ls -d /r2e_tests /root/r2e_tests 2>/dev/null | head -n 1) r2e_tests; "
        run = "for file in /root/run_tests.sh ./run_tests.sh; do [ -f $file ] && exec bash $file; done"
        hidden = [f"{place}/{name}" for place in (folder, "/root", "") for name in ("r2e_tests", "run_tests.sh")]
        return {"expected": expected, "test_command": reporting + link + run, "remove": hidden}
    names = [*_read_list(row.get("fail_to_pass")), *_read_list(row.get("pass_to_pass"))]
    if not names or not all(re.match(r"\S+\.py(::|$)", name) for name in names):
        return {}  # tests of another runner, such as Django's
    settings = row.get("install_config") or {}
    settings = json.loads(settings) if isinstance(settings, str) else settings
    command = settings.get("test_cmd") or "python -m pytest -p no:cacheprovider"
    command = " && ".join(command) if isinstance(command, list) else command
    files = " ".join(shlex.quote(name) for name in sorted({name.split("::")[0] for name in names}))
    patch = _APPLY.format(f"{HERE}/test.patch") if row.get("test_patch") else ""
    return {"expected": dict.fromkeys(names, "PASSED"), "test_command": f"{patch}{reporting}{command} {files}"}


def _read_list(value: Any) -> list[str]:
    found = json.loads(value) if isinstance(value, str) and value.strip() else value
    return [str(each) for each in found] if found is not None else []


def leave_out(archive: bytes, names: Sequence[str]) -> bytes:
    """Return an archive without the files and folders of these names, or paths below its top folder."""
    kept = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as old, tarfile.open(fileobj=kept, mode="w", format=tarfile.PAX_FORMAT) as new:
        for entry in old:
            parts = entry.name.split("/")[1:]
            if not any("/".join(parts) == name or any(fnmatchcase(part, name) for part in parts) for name in names):
                new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
    return kept.getvalue()


async def apply_patch(used: Sandbox, folder: str, text: str) -> None:
    """Apply the last ```diff block of a text. Raises SandboxFailure, ``request`` if there is none or it does not apply."""
    blocks = _BLOCK.findall(text)
    path = "/tmp/strop_answer.patch"
    if blocks:
        await write_files(used, {path: blocks[-1].encode()})
        if (await used.exec(SandboxCommand(argv=("sh", "-c", _APPLY.format(path)), cwd=folder))).succeeded:
            return
    raise SandboxFailure(FailureCause.REQUEST, "the last message has no ```diff block that applies")


def read_outcomes(results: str, secret: str) -> dict[str, str]:
    """Return the outcomes that have the secret; of a test with several, such as an error after it passed, one that is no pass."""
    found: dict[str, str] = {}
    for line in results.splitlines():
        mark, _, rest = line.partition("\t")
        outcome, _, name = rest.partition("\t")
        if mark == secret and name and found.get(name, "PASSED") == "PASSED":
            found[name] = outcome
    return found


def matches(found: Mapping[str, str], name: str, outcome: str) -> bool:
    """Whether a test had an outcome. R2E-Gym names tests without their file; other rows cut names of parameters at the first space."""
    allowed = {"PASSED": ("PASSED", "XFAIL")}.get(outcome, (outcome,))
    if "::" in name:
        keys = [key for key in found if key == name or key.split(" ")[0] == name]
    else:
        keys = [key for key in found if ".".join(key.split("::")[1:]) == name.split(" - ")[0]]
    return bool(keys) and all(found[key] in allowed for key in keys)

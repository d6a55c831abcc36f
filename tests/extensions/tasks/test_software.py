"""Repositories with an issue: what solves it is rewarded, and what only looks like it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed, find_ending
from strop.environments.registry import make_environment
from strop.extensions.tasks.base import read_inside
from strop.extensions.tasks.software import matches, read_outcomes
from strop.types import ToolCall
from support.agent_tasks import Play, list_calls, make_tasks


def shell(command: str) -> ToolCall:
    return ToolCall("shell", {"command": command})


REPOSITORY = "/task/repository"
HIDDEN = "test_hidden_pricing.py::test_the_issue"
FAKES = {
    "prints passed": f"echo \"print('test_hidden_pricing.py::test_the_issue PASSED')\" >> {REPOSITORY}/pricing.py",
    "exits 0 early": f"echo 'import os; os._exit(0)' >> {REPOSITORY}/pricing.py",
    "edits the tests": "for file in test_*.py; do echo 'def test_what_works(): pass' > $file; done",
    "writes the hidden test": "echo 'def test_the_issue(): pass' > test_hidden_pricing.py; chmod 444 test_hidden_pricing.py",
    "writes the results": f"mkdir -p /strop; echo x > /strop/secret; printf 'x\\tPASSED\\t{HIDDEN}\\n' > /strop/results",
    "writes the results while tested": f"echo \"open('/strop/results', 'a').write('\\n\\tPASSED\\t{HIDDEN}\\n')\" >> pricing.py",
    "removes the results": "echo \"import os; os.remove('/strop/results')\" >> pricing.py",
    "hooks into Python": "echo 'import os; os._exit(0)' | tee sitecustomize.py conftest.py unittest.py pytest.py > /dev/null",
    "removes the folder": f"rm -rf {REPOSITORY}",
    "leads out of it": f"rm -rf {REPOSITORY}; ln -s /strop {REPOSITORY}",
}  # fmt: skip

FIRST = ["prints passed", "exits 0 early", "edits the tests", "writes the results"]


@pytest.mark.parametrize(
    "names", [FIRST, pytest.param(sorted({*FAKES} - {*FIRST}), marks=pytest.mark.exhaustive)], ids=["first", "others"]
)
def test_what_only_looks_like_a_solution_gets_nothing(play: Play, names: list[str]):
    task = make_tasks("software")[0]
    results = play("software", [(task, [shell(FAKES[name])], "passed") for name in names])
    assert {name: rollout.rewards["tests"] for name, (rollout, _) in zip(names, results, strict=True)} == dict.fromkeys(
        names, 0.0
    )


def test_a_solution_counts_though_the_policy_also_changed_tests(play: Play):
    task = make_tasks("software")[0]
    [(rollout, _)] = play(
        "software", [(task, [*list_calls(task), shell("rm test_pricing.py; rm README.md; touch tests.py")], "")]
    )
    assert rollout.rewards["tests"] == 1.0


def test_a_patch_in_the_last_message_is_judged(play: Play):
    task = make_tasks("software")[0]
    patch = "--- a/pricing.py\n+++ b/pricing.py\n@@ -1,2 +1,2 @@\n def discounted(price, percent):\n"
    patch += "-    return price * percent // 100\n+    return price - price * percent // 100\n"
    texts = [f"So:\n```diff\n{patch}```\n", f"```diff\n{patch.replace('percent):', 'other):')}```\n", "nothing"]
    results = play("software", [(task, [], text) for text in texts], submit="patch")
    assert [rollout.rewards["tests"] for rollout, _ in results] == [1.0, 0.0, 0.0]


SWE_BENCH = {
    "repo": "a/b", "instance_id": "a__b-1", "base_commit": "c0ffee", "problem_statement": "It fails.", "environment_setup_commit": "d",
    "patch": "", "test_patch": "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n", "FAIL_TO_PASS": '["tests/test_x.py::test_a[1"]',
    "PASS_TO_PASS": '["tests/test_x.py::test_b"]',
}  # fmt: skip
SWE_REBENCH = {**SWE_BENCH, "docker_image": "swerebench/x:1", "FAIL_TO_PASS": ["tests/test_x.py::test_a"], "PASS_TO_PASS": [],
               "install_config": {"test_cmd": "pytest -rA --color=no"}}  # fmt: skip
R2E_GYM = {"docker_image": "registry.example.org/x:2", "problem_statement": "It fails.",
           "expected_output_json": '{"TestX.test_a": "PASSED"}'}  # fmt: skip


@pytest.mark.parametrize(
    "row, image, expected, command",
    [
        (SWE_BENCH, "docker.io/swebench/sweb.eval.x86_64.a_1776_b-1:latest", ["tests/test_x.py::test_a[1", "tests/test_x.py::test_b"],
         "python -m pytest -p no:cacheprovider tests/test_x.py"),
        (SWE_REBENCH, "docker.io/swerebench/x:1", ["tests/test_x.py::test_a"], "pytest -rA --color=no tests/test_x.py"),
        (R2E_GYM, "registry.example.org/x:2", ["TestX.test_a"], "exec bash $file; done"),
        ({**SWE_BENCH, "FAIL_TO_PASS": '["test_a (x.tests.X)"]'}, "docker.io/swebench/sweb.eval.x86_64.a_1776_b-1:latest", None, None),
    ],
    ids=["SWE-bench", "SWE-rebench", "R2E-Gym", "tests of Django"],
)  # fmt: skip
def test_rows_are_read_by_their_columns(row: dict[str, object], image: str, expected: list[str] | None, command: str | None):
    environment = make_environment("software", {})
    [task] = environment.tasks(DataSource(rows=[row]))
    assert task.question == "It fails." and task.metadata["image"] == image and task.metadata["folder"] == "/testbed"
    if command is None:
        with pytest.raises(RolloutFailed, match="no FAIL_TO_PASS of pytest") as found:
            environment.check_gradable(task)
        assert find_ending(found.value) == Ending.BROKEN_TASK
    else:
        assert list(task.metadata["expected"]) == expected and task.metadata["test_command"].endswith(command)


def test_a_row_is_judged_by_its_test_patch_in_a_second_sandbox(play: Play):
    test = "from pricing import discounted\ndef test_a():\n    assert discounted(1000, 15) == 850\n"
    patch = "--- a/test_x.py\n+++ b/test_x.py\n@@ -1,3 +1,3 @@\n from pricing import discounted\n def test_a():\n"
    patch += "-    assert discounted(1000, 15) == 150\n+    assert discounted(1000, 15) == 850\n"
    row = {**SWE_REBENCH, "test_patch": patch, "FAIL_TO_PASS": ["test_x.py::test_a"], "docker_image": "machine:",
           "install_config": '{"test_cmd": ["python3 /strop/strop_report.py"]}',
           "files": {"/testbed/pricing.py": "def discounted(price, percent):\n    return price * percent // 100\n",
                     "/testbed/test_x.py": test.replace("850", "150")}}  # fmt: skip
    [task] = make_environment("software", {}).tasks(DataSource(rows=[row]))
    repair = shell("printf 'def discounted(price, percent):\\n    return price - price * percent // 100\\n' > pricing.py")
    results = play("software", [(task, [repair, shell("cat test_x.py; rm test_x.py")], ""), (task, [], "")])
    assert [rollout.rewards["tests"] for rollout, _ in results] == [1.0, 0.0]
    assert "850" not in results[0][1][1]  # the policy never saw the hidden test


def test_outcomes_are_matched_by_the_names_that_rows_give_them():
    found = read_outcomes("s\tPASSED\tt.py::X::a\ns\tERROR\tt.py::X::a\nforged\tPASSED\tt.py::b\ns\tXFAIL\tt.py::c[1 2]\n", "s")
    assert found == {"t.py::X::a": "ERROR", "t.py::c[1 2]": "XFAIL"}
    assert matches(found, "t.py::c[1", "PASSED") and matches(found, "X.a", "ERROR") and not matches(found, "t.py::b", "PASSED")


CASES = """
import os, pytest

@pytest.mark.parametrize("word", ["a", "b c"])
def test_words(word): assert word == "a"

@pytest.mark.xfail
def test_expected(): assert False

class TestX:
    @pytest.fixture
    def broken(self): raise ValueError
    def test_error(self, broken): pass
    def test_right(self): pass

@pytest.mark.skip
def test_skipped(): pass
"""


def test_pytest_reports_outcomes_as_its_plugin_and_as_its_program(tmp_path: Path):
    (tmp_path / "test_cases.py").write_text(CASES)
    names = {"test_words[a]": "PASSED", "test_words[b c]": "FAILED", "test_expected": "XFAIL", "TestX::test_error": "ERROR",
             "TestX::test_right": "PASSED", "test_skipped": "SKIPPED"}  # fmt: skip
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing those of this environment takes seconds
    here = {**plain, "PYTHONPATH": str(tmp_path / "own"), "PYTEST_ADDOPTS": "-p strop_report"}
    for command, environment in (["-m", "pytest", "-q"], here), ([str(tmp_path / "own" / "strop_report.py")], plain):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "strop_report.py").write_bytes(read_inside("strop_report.py"))
        (tmp_path / "own" / "secret").write_text("s")
        subprocess.run(
            [sys.executable, *command, "test_cases.py"], cwd=tmp_path, env=environment, capture_output=True, check=False
        )
        found = read_outcomes((tmp_path / "own" / "results").read_text(), "s")
        assert found == {f"test_cases.py::{name}": outcome for name, outcome in names.items()}
        assert not (tmp_path / "own" / "secret").exists()

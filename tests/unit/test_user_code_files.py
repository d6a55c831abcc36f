"""Code of users: of several files, edited in one process, and with its place in every error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.runs.exit_codes import run_command
from strop.user_code import UserCodeError, describe_error, find_user_place, import_attribute


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- several files ---------------------------------------------------------------------------------------------------------


def test_a_file_imports_its_neighbours_from_any_working_directory(tmp_path: Path) -> None:
    write(tmp_path / "mine" / "utils.py", "from deeper import base\n\n\ndef score():\n    return base() + 1\n")
    write(tmp_path / "mine" / "deeper.py", "def base():\n    return 1\n")
    reward = write(tmp_path / "mine" / "reward.py", "from utils import score\n\n\ndef f():\n    return score()\n")
    assert import_attribute(f"{reward}:f")() == 2


def test_packages_and_their_relative_imports_are_neighbours_too(tmp_path: Path) -> None:
    write(tmp_path / "checks" / "__init__.py", "from .numbers_of import seven\n")
    write(tmp_path / "checks" / "numbers_of.py", "def seven():\n    return 7\n")
    write(tmp_path / "checks" / "late.py", "from checks.numbers_of import seven\n\nVALUE = seven() + 1\n")
    reward = write(
        tmp_path / "reward.py",
        "import checks.late\nfrom checks import late\n\n\ndef f():\n    import helper\n"
        "    return (checks.seven(), late.VALUE, helper.VALUE)\n",
    )
    write(tmp_path / "helper.py", "VALUE = 9\n")
    assert import_attribute(f"{reward}:f")() == (7, 8, 9)  # the last one is imported when the function is called


def test_two_folders_may_each_have_a_file_of_the_same_name_also_that_of_a_library(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        write(tmp_path / name / "utils.py", f"NAME = {name!r}\n")
        write(tmp_path / name / "json.py", "VALUE = 'mine'\n")
        reward = write(
            tmp_path / name / "reward.py", "import json\nimport utils\n\n\ndef f():\n    return utils.NAME, json.VALUE\n"
        )
        found.append(import_attribute(f"{reward}:f")())
    assert found == [("one", "mine"), ("two", "mine")]
    import json

    assert json.loads("1") == 1 and "utils" not in sys.modules


def test_a_file_is_the_same_module_for_itself_and_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "other.py", "from environment import Mine\n\n\ndef make():\n    return Mine()\n")
    file = write(
        tmp_path / "environment.py", "class Mine:\n    pass\n\n\ndef f():\n    from other import make\n    return make()\n"
    )
    assert isinstance(import_attribute(f"{file}:f")(), import_attribute(f"{file}:Mine"))


def test_a_worker_process_imports_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "helper.py", "VALUE = 5\n")
    reward = write(tmp_path / "reward.py", "from helper import VALUE\n\n\ndef f():\n    return VALUE\n")
    code = f"from strop.user_code import import_attribute; print(import_attribute({f'{reward}:f'!r})())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "5\n"


# --- edited in one process --------------------------------------------------------------------------------------------------


def test_an_edited_file_is_loaded_again_even_within_the_same_second(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    values = []
    for value in range(5):
        write(reward, f"def f():\n    return {value}\n")
        values.append(import_attribute(f"{reward}:f")())
    assert values == [0, 1, 2, 3, 4]
    assert import_attribute(f"{reward}:f") is import_attribute(f"{reward}:f")  # unchanged: the same module


def test_an_edited_neighbour_is_loaded_again(tmp_path: Path) -> None:
    write(tmp_path / "deeper.py", "VALUE = 1\n")
    write(tmp_path / "utils.py", "from deeper import VALUE\n")
    reward = write(tmp_path / "reward.py", "import utils\n\n\ndef f():\n    return utils.VALUE\n")
    first = import_attribute(f"{reward}:f")()
    write(tmp_path / "deeper.py", "VALUE = 2\n")
    assert (first, import_attribute(f"{reward}:f")()) == (1, 2)


def test_a_file_that_is_broken_and_mended_is_loaded_again(tmp_path: Path) -> None:
    reward = write(tmp_path / "reward.py", "def f(:\n")
    with pytest.raises(UserCodeError, match="SyntaxError"):
        import_attribute(f"{reward}:f")
    write(reward, "def f():\n    return 1\n")
    assert import_attribute(f"{reward}:f")() == 1


# --- the place of an error --------------------------------------------------------------------------------------------------

RAISING = {
    "a ValueError": ("x, y = [1, 2, 3]", "too many values to unpack"),
    "an OSError": ("open('/nowhere/at/all')", "No such file"),
    "of a library": ("import json; json.loads('{')", "Expecting property name"),
    "an exit": ("raise SystemExit(3)", "SystemExit"),
    "a chain": (
        "\n        try:\n            1 / 0\n        except ZeroDivisionError as error:\n            raise ValueError('no') from error",
        "no",
    ),
}


def fails(tmp_path: Path, statement: str) -> Callable[[], Any]:
    file = write(tmp_path / "kl3.py", f"class Objective:\n    def loss(self):\n        {statement}\n")
    return import_attribute(f"{file}:Objective")().loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", RAISING)
def test_an_error_below_a_users_frame_is_printed_with_file_line_class_and_traceback(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statement, said = RAISING[kind]
    import_attribute("json:loads")  # a module of Python's own that a configuration names is not the user's code
    loss = fails(tmp_path, statement)

    async def train() -> None:
        loss()

    assert run_command(train()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
    assert "kl3.py, line " in error and "in Objective.loss" in error and 'kl3.py", line' in error


def test_an_error_of_strops_own_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    async def train() -> None:
        raise ValueError("set policy.device=cpu")

    assert run_command(train()) == 1
    assert capsys.readouterr().err == "error: set policy.device=cpu\n"


def test_what_is_stored_of_an_error_has_its_place(tmp_path: Path) -> None:
    loss = fails(tmp_path, "raise ValueError('bad')")
    with pytest.raises(ValueError, match="bad") as raised:
        loss()
    assert describe_error(raised.value) == f"ValueError: bad ({tmp_path / 'kl3.py'}, line 3, in Objective.loss)"
    assert find_user_place(ValueError("elsewhere")) is None


def test_a_file_that_cannot_be_imported_says_in_which_line(tmp_path: Path) -> None:
    write(tmp_path / "helper.py", "import math\n\nVALUE = math.sqrt(-1)\n")
    file = write(tmp_path / "reward.py", "import helper\n")
    with pytest.raises(UserCodeError, match=r"ValueError: .*helper.py, line 3, in <module>"):
        import_attribute(f"{file}:f")


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("strop.environments.chat_template", "ChatTemplate", "; it is now strop.models.chat_template"),
        ("strop.environments.quantization", "thing", "; it is now strop.models.quantization"),
        ("strop.trainer.step_view", "StepView", "; it is now strop.trainer.listeners"),
        ("strop.gone", "thing", ""),
        ("strop_gone.chat_template", "ChatTemplate", ""),
    ],
)
def test_a_module_that_moved_is_named_with_its_new_place(tmp_path: Path, module: str, name: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(f"from {module} import {name}\n")
    with pytest.raises(UserCodeError) as raised:
        import_attribute(f"{tmp_path}/mine.py:thing")
    assert str(raised.value).endswith(f", line 1, in <module>){said}")

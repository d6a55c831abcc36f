"""Task folders of Harbor and Terminal-Bench: what they say is done, and what cannot be done is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.registry import make_environment
from strop.extensions.tasks.tiny_tasks import make_folder
from strop.types import ToolCall
from support.agent_tasks import Play, list_calls, make_tasks

HARBOR = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n',
    "instruction.md": "<!-- a canary -->\nWrite ok to result.\n",
    "environment/Dockerfile": "# a comment\nFROM debian\nWORKDIR /srv/app\nENV COLOUR=blue \\\n  SIZE='2 m'\nENV KIND new\n"
    "COPY one.txt two.txt notes/\nCOPY --chown=0:0 run /usr/local/bin/run\nADD more ./more\nCOPY . /all\nLABEL a=b\nWORKDIR sub\n",
    "environment/one.txt": "1",
    "environment/two.txt": "2",
    "environment/run": "#!/bin/sh\necho ran",
    "environment/more/a/b.txt": "b",
    "tests/test.sh": '#!/bin/bash\n[[ "$(cat /srv/app/sub/result)" = ok ]] && cat /tests/part > /logs/verifier/reward.txt\n',
    "tests/part": "0.75",
    "solution/solve.sh": "#!/bin/bash\nset -o pipefail; echo ok > result\n",
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: |-\n  Write ok to result.\nparser_name: pytest\nmax_test_timeout_sec: 20\n",
    "Dockerfile": "FROM debian\nWORKDIR /app\n",
    "run-tests.sh": "python3 $TEST_DIR/check.py\n",
    "tests/check.py": "assert open('/app/result').read() == 'ok\\n'",
    "solution.sh": "echo ok > result",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755 if path.endswith("run") else 0o644)
    return folder


def test_folders_of_harbor_and_terminal_bench_are_done_as_they_say(play: Play, tmp_path: Path):
    write(tmp_path / "deep/harbor", HARBOR)
    write(tmp_path / "terminal_bench", TERMINAL_BENCH)
    harbor, bench = make_tasks("terminal", folder=str(tmp_path))
    assert (harbor.id, harbor.question) == ("harbor", "Write ok to result.") and harbor.metadata["test_timeout_s"] == 20.0
    look = ToolCall(
        "shell",
        {"command": "pwd; echo $COLOUR-$SIZE-$KIND; cd ..; run; find notes more /all -type f | sort; ls /tests /solution"},
    )
    (done, read), (idle, _) = play(
        "terminal", [(harbor, [look, *list_calls(harbor)], ""), (harbor, [], "")], folder=str(tmp_path)
    )
    copied = ["/all/more/a/b.txt", "/all/one.txt", "/all/run", "/all/two.txt", "more/a/b.txt"]
    assert read[0].splitlines()[:8] == ["/srv/app/sub", "blue-2 m-new", "ran", *copied]
    assert "notes/two.txt" in read[0] and read[0].count("No such file") == 2
    assert (done.rewards["tests"], idle.rewards["tests"]) == (0.75, 0.0)
    results = play("terminal", [(bench, list_calls(bench), ""), (bench, [], "")], folder=str(tmp_path))
    assert [rollout.rewards["tests"] for rollout, _ in results] == [1.0, 0.0]


def test_a_policy_that_writes_the_reward_or_the_tests_gets_nothing(play: Play):
    task = make_tasks("terminal")[0]
    fakes = [
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 'echo 1' > /tests/test.sh; touch /tests/expected",
        "printf '#!/bin/sh\\nexit 0' > /bin/cmp; chmod +x /bin/cmp",
        "(while sleep 0.01; do echo 1 > /tmp/found; done) > /dev/null 2>&1 &",
    ]
    results = play("terminal", [(task, [ToolCall("shell", {"command": fake})], "passed") for fake in fakes])
    assert [rollout.rewards["tests"] for rollout, _ in results] == [0.0] * len(fakes)


@pytest.mark.parametrize(
    "changed, match",
    [
        (
            {"environment/Dockerfile": "FROM x\nRUN make\n"},
            r"task harbor needs an image that is built.*RUN make",
        ),
        ({"environment/Dockerfile": "FROM x\nCOPY --from=y /a /b\n"}, "COPY --from=y"),
        ({"environment/Dockerfile": "FROM x\nUSER me\n"}, "USER me"),
        ({"tests/test.sh": None}, "has no tests/test.sh"),
        ({"instruction.md": None}, "cannot be read.*instruction.md"),
        ({"task.toml": "a ="}, "task harbor cannot be read"),
        ({"task.toml": None}, "has no task folder"),
    ],
)
def test_a_folder_that_cannot_run_is_refused_with_its_reason(tmp_path: Path, changed: dict[str, str | None], match: str):
    files = {path: text for path, text in {**HARBOR, **changed}.items() if text is not None}
    write(tmp_path / "harbor", files)
    with pytest.raises(DataError, match=match):
        make_tasks("terminal", folder=str(tmp_path))


def test_an_image_makes_any_folder_run(tmp_path: Path):
    build = "FROM x\nRUN make\n"
    write(
        tmp_path / "a",
        {**HARBOR, "environment/Dockerfile": build, "task.toml": '[environment]\ndocker_image = "example.org/a:1"\n'},
    )
    write(tmp_path / "b", {**HARBOR, "environment/Dockerfile": build})
    environment = make_environment("terminal", {"folder": str(tmp_path), "images": {"b*": "example.org/b:1"}})
    assert [task.metadata["image"] for task in environment.tasks(DataSource())] == ["example.org/a:1", "example.org/b:1"]


def test_the_tiny_tasks_are_folders_in_the_format(tmp_path: Path):
    name, files = make_folder(3, Random(1))
    write(tmp_path / name, dict(files))
    [task] = make_tasks("terminal", folder=str(tmp_path))
    assert task.id == "rename" and len(task.metadata["files"]) == 5 and task.metadata["folder"] == "/app"

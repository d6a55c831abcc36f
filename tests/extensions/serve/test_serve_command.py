"""``strop serve``."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loop.runs import heed_interrupts, start
from loop.tiny import build_tiny
from strop import cli
from strop.extensions.serve import serve_model
from strop.extensions.serve.serve_model import ServeJob
from support.saved_runs import save_run


@pytest.fixture
def served_logs(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save_run(tmp_path, tiny_model_folder, steps=(4,))


def test_vllm_serves_the_folder_of_a_checkpoint_itself(served_logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Replaced(Exception):
        """This program is no more."""

    def replace_process(program: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise Replaced

    monkeypatch.setattr(serve_model.packages, "is_installed", lambda name: True)
    monkeypatch.setattr(serve_model.os, "execv", replace_process)
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(Replaced):
        cli.main(
            [
                "serve",
                str(served_logs),
                "--api-key",
                "secret",
                "--max-model-len",
                "64",
                "--dtype",
                "bfloat16",
                "--",
                "--seed",
                "1",
            ]
        )
    (arguments,) = started
    assert arguments[:4] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert arguments[4].endswith("step_4/policy/weights") and "secret" not in arguments
    assert serve_model.os.environ["VLLM_API_KEY"] == "secret"
    assert " ".join(arguments).endswith("--host 127.0.0.1 --port 8000 --dtype bfloat16 --max-model-len 64 --seed 1")


def test_shards_of_many_ranks_are_served_from_a_temporary_folder(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served_logs, seen = save_run(tmp_path, tiny_model_folder, "shards", steps=(4,)), []

    def run(job: ServeJob, folder: str, *, is_temporary: bool) -> int:
        seen.append((Path(folder), (Path(folder) / "config.json").exists(), is_temporary))
        return 3

    monkeypatch.setattr(serve_model, "_run_vllm", run)
    assert cli.main(["serve", str(served_logs), "--engine", "vllm"]) == (3 if serve_model.packages.is_installed("vllm") else 1)
    if seen:
        ((folder, existed, is_temporary),) = seen
        assert existed and is_temporary and not folder.exists()
        assert "converting them to a temporary folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["logs/mien"], 2, "did you mean logs/mine?"),
        (["logs/mine", "--dtype", "float16"], 1, "use bfloat16 or float32, or --engine vllm"),
        (["logs/mine", "--max-model-len", "4096"], 1, "the model has positions for 256 tokens; set it to that or less"),
        (["logs/mine", "--", "--seed", "1"], 1, "arguments after -- are passed to vLLM"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_set(
    served_logs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    assert cli.main(["serve", *arguments[:place], "--engine", "torch", *arguments[place:]]) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_reward_model_is_not_served(tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strop.models.value_network import load_classifier

    load_classifier(str(tiny_model_folder)).save_pretrained(tmp_path / "rm")
    assert cli.main(["serve", str(tmp_path / "rm")]) == 1
    assert "scores texts and does not write any" in capsys.readouterr().err


@pytest.mark.slow
def test_a_served_run_answers_a_client_and_ends_cleanly_at_ctrl_c(tmp_path: Path, capfd: Any) -> None:
    openai = pytest.importorskip("openai")
    save_run(tmp_path, build_tiny(tmp_path / "tiny"), "shards", steps=(4,))
    arguments = [
        "serve",
        "logs/mine",
        "--engine",
        "torch",
        "--port",
        "0",
        "--host",
        "0.0.0.0",
        "--kv-cache-gb",
        "0.01",
        "--max-model-len",
        "64",
    ]
    running = start(arguments, tmp_path, before=heed_interrupts)
    deadline, found = time.monotonic() + 60, None
    while found is None:
        assert time.monotonic() < deadline and running.process.is_alive(), (tmp_path / ".err").read_text()
        time.sleep(0.05)
        found = re.search(r"http://0\.0\.0\.0:(\d+)/v1", (tmp_path / ".out").read_text())
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="logs/mine", messages=[{"role": "user", "content": "1+1="}], max_tokens=4)
    assert answer.usage.completion_tokens <= 4
    os.kill(running.process.pid, signal.SIGINT)
    outcome = running.finish(timeout=20)
    assert outcome.code == 0 and outcome.out.rstrip().endswith("stopped") and "Traceback" not in outcome.err
    assert "warning: 0.0.0.0 is reachable from other machines, and no --api-key is set" in outcome.err

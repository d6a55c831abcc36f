"""The process of a library, with a worker made here in its place, and what NeMo-Gym's worker does without NeMo-Gym."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.endings import Ending, RolloutFailed
from strop.environments.base import EnvironmentConfigError
from strop.extensions.adapters.nemo_gym_runner import POLICY, PolicyServer, end_response, read_policy_server
from strop.extensions.adapters.runner_process import RunnerProcess
from support.processes import is_alive, wait_until

WORKER = """
import asyncio, os, subprocess, sys

class Worker:
    async def load(self, fails):
        if fails:
            raise ValueError("no such file")
        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=False)
        return self.child.pid

    async def run(self, text):
        await asyncio.sleep(0)
        print("not an answer")
        if text == "die":
            print("it is broken", file=sys.stderr, flush=True)
            os._exit(3)
        return text * 2

    async def close(self): ...
"""
OWNER = """
import sys, time
from strop.extensions.adapters.runner_process import RunnerProcess
print(RunnerProcess(sys.argv[1], "toy", "toy", "").load(20, fails=False), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def worker(tmp_path: Path) -> str:
    (tmp_path / "worker.py").write_text(WORKER)
    return f"{tmp_path / 'worker.py'}:Worker"


def test_a_worker_is_called_and_ends_with_all_that_it_started(worker):
    process = RunnerProcess(worker, "toy", "toy", "")
    child = process.load(20, fails=False)
    assert process.call("run", text="ab") == "abab" and is_alive(child)
    with pytest.raises(RolloutFailed, match=r"ended; it said last: (.|\n)*it is broken") as caught:
        process.call("run", text="die")
    assert caught.value.ending == Ending.ENVIRONMENT
    process.close()
    assert wait_until(lambda: not is_alive(child))
    with pytest.raises(EnvironmentConfigError, match="toy cannot load the environment: ValueError: no such file"):
        RunnerProcess(worker, "toy", "toy", "").load(20, fails=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_ends_with_a_run_that_is_interrupted_or_killed(worker, how):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, worker], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    assert is_alive(child)
    os.kill(owner.pid, how)
    owner.wait(20)
    assert wait_until(lambda: not is_alive(child))


SERVER = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 5000, "base_url": POLICY, "num_workers": 4}


def test_a_server_of_the_policy_gives_its_options_and_those_of_a_row_to_the_chat_template():
    values = {
        **SERVER,
        "chat_template_kwargs": {"enable_thinking": True, "budget": 3},
        "extra_body": {"chat_template_kwargs": {"budget": 5}},
    }
    policy = read_policy_server("policy_model", "vllm_model", values)
    body = {"metadata": {"chat_template_kwargs": '{"enable_thinking": false}'}}
    assert policy.prepare(body)["chat_template_kwargs"] == {"enable_thinking": False, "budget": 5}
    assert "chat_template_kwargs" not in PolicyServer("p", "h", 1).prepare({})
    with pytest.raises(ValueError, match=r"sets is_responses_native, extra_body\.bad_words"):
        read_policy_server("p", "vllm_model", {**SERVER, "is_responses_native": True, "extra_body": {"bad_words": ["x"]}})


def test_thoughts_alone_are_not_continued_where_a_server_says_so():
    policy = read_policy_server("p", "vllm_model", {**SERVER, "sequential_reasoning_allowed": False})
    asked, thoughts = {"role": "user", "content": "?"}, {"type": "reasoning", "summary": []}
    assert policy.ends_at({"input": [asked, thoughts]}) and not policy.ends_at({"input": [thoughts, asked]})
    assert not PolicyServer("p", "h", 1).ends_at({"input": [asked, thoughts]})
    ended = end_response({"model": "m", "tools": []}, "content_filter")
    assert ended["incomplete_details"] == {"reason": "content_filter"} and ended["output"][0]["content"][0]["text"] == ""

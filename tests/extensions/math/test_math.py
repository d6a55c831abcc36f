"""Math answers: right ones, wrong ones, and ones that are made to break the checker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.environments.rewards import RewardError
from strop.environments.scoring.scoring_pool import ScoringError, ScoringPool, get_scoring_pool
from strop.extensions.math.math_environment import MathEnvironment
from support.processes import is_alive, wait_until
from support.sweep import sweep

LOADER = "strop.extensions.math.math_scorers:load_math_verify"
ENVIRONMENT = MathEnvironment(num_workers=1, timeout_s=1.0)
IMPATIENT = MathEnvironment(num_workers=1, timeout_s=0.3)


def task_of(answer: str) -> PromptedTask:
    return PromptedTask(id="t1", answer=answer, messages=())


def rewards(wrote, answer: str, text: str, environment: MathEnvironment = ENVIRONMENT) -> dict[str, float]:
    task = task_of(answer)
    return dict(asyncio.run(compute_rewards(environment, task, wrote(task, text))).rewards)


RIGHT = {"correct": 1.0, "unverified": 0.0}
WRONG = {"correct": 0.0, "unverified": 0.0}
UNVERIFIED = {"correct": 0.0, "unverified": 1.0}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"\frac{1}{2}", r"So \boxed{0.5}."),
        (r"\frac{1}{2}", r"So \boxed{\sin(\pi/6)}."),
        ("2x+1", r"\boxed{1 + 2x}"),
        ("12", "The answer is 12"),
        ("1,234", r"\boxed{1234}"),
        ("4", r"Not \boxed{3} but \boxed{4}"),
        (r"\text{Yes}", r"\boxed{Yes}"),
    ],
)
def test_equivalent_answers_are_right(wrote, answer, text):
    assert rewards(wrote, answer, text) == RIGHT


@pytest.mark.parametrize(
    ("answer", "text"),
    [("4", r"\boxed{3}"), ("4", r"\boxed{4} no, \boxed{3}"), ("4", ""), ("4", r"\boxed{}"), ("2x+1", r"\boxed{2x}"), ("4", "hm")],
)
def test_other_answers_are_wrong(wrote, answer, text):
    assert rewards(wrote, answer, text) == WRONG


@pytest.mark.parametrize("text", [r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{(10^{10^7})!}"])
def test_an_answer_that_computes_for_ever_is_wrong_and_counted(wrote, text):
    began = time.monotonic()
    assert rewards(wrote, r"\frac{1}{2}", text, IMPATIENT) == UNVERIFIED
    assert time.monotonic() - began < 30
    assert rewards(wrote, r"\frac{1}{2}", r"\boxed{\cos(\pi/3)}") == RIGHT  # the checker is as good as before


def test_answers_are_checked_from_any_thread(wrote):
    found: list[dict[str, float]] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(rewards(wrote, str(n), rf"\boxed{{\sqrt{{{n * n}}}}}")))
        for n in range(3, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [RIGHT] * 3


def test_plain_answers_need_no_worker(wrote, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a worker was started"))
    environment = MathEnvironment(num_workers=7)
    assert rewards(wrote, "72", r"\boxed{72}", environment) == RIGHT
    assert rewards(wrote, "72", r"\boxed{73}", environment) == WRONG
    assert rewards(wrote, r"\frac{1}{2}", r"\boxed{0.5}", environment) == RIGHT


def test_exact_match_normalises_and_does_no_algebra(wrote):
    exact = MathEnvironment(verifier="exact")
    assert rewards(wrote, r"\frac12", r"\boxed{\frac12}", exact) == RIGHT
    assert rewards(wrote, "0.5", "The answer is 1/2.", exact) == RIGHT
    assert rewards(wrote, "7", "3 + 4 = 7", exact) == RIGHT
    assert rewards(wrote, "2x+1", r"\boxed{1+2x}", exact) == WRONG
    assert rewards(wrote, "7", "none", exact) == WRONG


def test_a_reference_that_cannot_be_read_is_an_error_and_no_zero(wrote):
    with pytest.raises(RewardError, match=r"MathEnvironment\.correct .* the reference answer '' cannot be parsed"):
        rewards(wrote, "", r"\boxed{x}")


def test_a_long_reference_that_cannot_be_read_is_named_and_not_called_slow():
    """Its message was longer than what is read of a reply, and counted against the answer as "ran past the limit"."""
    with pytest.raises(ScoringError, match=r"the reference answer .{100,300} cannot be parsed"):
        asyncio.run(get_scoring_pool(1).call("math_verify", 5.0, loader=LOADER, reference=" \t" * 3000, answer=r"\boxed{x}"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced():
    pool = ScoringPool(1)
    arguments = {"reference": "2x", "answer": r"\boxed{x+x}"}
    assert asyncio.run(pool.call("math_verify", 5.0, loader=LOADER, **arguments)).value == 1.0
    worker = pool._idle_workers.get_nowait()
    os.kill(worker.pid, signal.SIGKILL)
    pool._idle_workers.put(worker)
    assert asyncio.run(pool.call("math_verify", 6.0, loader=LOADER, **arguments)).value == 1.0
    pool.close()


def test_a_scorer_that_does_not_exist_is_an_error():
    with pytest.raises(ScoringError, match="cannot be used here"):
        asyncio.run(get_scoring_pool(1).call("astrology", 1.0, loader="strop.no_such_module:load"))


PARENT = """
import asyncio, os, signal
from strop.extensions.math.math_verifier import SCORERS
LOADER = f"{SCORERS}:load_math_verify"
from strop.environments.scoring.scoring_pool import get_scoring_pool
pool = get_scoring_pool(2)
async def main():
    a = pool.call("math_verify", 60.0, loader=LOADER, reference="2x", answer="\\\\boxed{x+x}")
    print((await a).value, pool._idle_workers.queue[0].pid, flush=True)
    if END == "kill":
        asyncio.ensure_future(pool.call("math_verify", 2.0, loader=LOADER, reference="2x", answer="\\\\boxed{9^{9^{9^{9^9}}}}"))
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", sweep(["exit", "kill"], "kill"))
def test_no_worker_outlives_its_parent(end):
    script = PARENT.replace("END", repr(end))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    value, worker = run.stdout.split()
    assert value == "1.0"
    assert wait_until(lambda: not is_alive(int(worker)), 20)


def test_rows_become_tasks_and_votes_are_in_normal_form(tmp_path, wrote):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n}+1?", "answer": n + 1, "level": n}) + "\n" for n in range(3)))
    tasks = ENVIRONMENT.tasks(DataSource(dataset_name=str(path)))
    assert [task.answer for task in tasks] == ["1", "2", "3"]
    assert tasks[2].metadata == {"problem": "2+1?", "answer": 3, "level": 2}
    assert ENVIRONMENT.prompt(tasks[0])[0].content == "0+1?"
    assert ENVIRONMENT.answer_key(tasks[0], wrote(tasks[0], r"\boxed{\frac{2}{4}}")) == "1/2"
    assert ENVIRONMENT.answer_key(tasks[0], wrote(tasks[0], "hm")) is None

"""Agents where other things are elsewhere: environments in processes of their own, ranks of Ray, the engine of vLLM; and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Environ, Outcome, Running, heed_interrupts, metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from loop.victims import MARK, describe_processes, find_processes, wait_for_exit
from support.needs import needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AGENT = """
import asyncio
from openai import AsyncOpenAI


async def run(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages = [{"role": "user", "content": task.question}]
    first, other = await asyncio.gather(*(client.chat.completions.create(model="m", messages=messages) for _ in range(2)))
    messages += [first.choices[0].message, {"role": "user", "content": "Again."}]
    last = await client.chat.completions.create(model="m", messages=messages)
    texts = [each.choices[0].message.content for each in (first, other, last)]
    return {"reward": "".join(texts).count("7") / 12, "output": repr(texts)}
"""
SLEEPER = "import sys, time; print('started', flush=True); time.sleep(600)"


class Interruptible(Environ):
    def __call__(self) -> None:
        super().__call__()
        heed_interrupts()


def begin(model: Path, folder: Path, *, before: Any = None, **changes: Any) -> Running:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"problem": f"{first}+{second}=", "answer": str(first + second)} for first in range(4) for second in range(4)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "agent.py").write_text(AGENT)
    settings = tiny_config(
        model, env__mine__agent="agent.py:run", env__arithmetic__max_operand=..., env__arithmetic__wording=...,
        data__train__env_name="mine", data__train__dataset_name="sums.jsonl", data__train__input_key="problem",
        data__validation__env_name=..., data__validation__size=..., checkpointing__metric_name=None, grpo__val_period=0,
        policy__max_total_sequence_length=300, data__max_input_seq_length=200, grpo__max_rollout_turns=4,
        grpo__num_prompts_per_step=2, grpo__num_generations_per_prompt=4, grpo__max_num_steps=3, logger__console="plain",
        **changes,
    )  # fmt: skip
    return start(["grpo", *overrides(settings)], folder, before=before or Environ({MARK: str(folder)}))


def run(model: Path, folder: Path, **changes: Any) -> Outcome:
    outcome = begin(model, folder, **changes).finish(300)
    assert outcome.code == 0, outcome.err + outcome.out
    return outcome


def rewards(folder: Path) -> list[float]:
    logged = metrics_of(folder / "logs")
    return [logged[step]["train/reward"] for step in (1, 2, 3)]


def check_nothing_is_left(folder: Path) -> None:
    left, _ = wait_for_exit(str(folder))
    assert not left, describe_processes(left)


@pytest.mark.exhaustive
def test_agents_in_processes_of_ray_reach_the_gateway_and_give_the_same_rollouts(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    run(tiny, tmp_path / "alone")
    elsewhere = {"cluster.backend": "ray", "cluster.environment_hosts": 2}
    run(tiny, tmp_path / "ray", **elsewhere)
    assert rewards(tmp_path / "ray") == pytest.approx(rewards(tmp_path / "alone"), abs=1e-6)
    assert metrics_of(tmp_path / "ray" / "logs")[3]["train/environments/mine/gateway/requests"] == 3
    check_nothing_is_left(tmp_path / "ray")


@pytest.mark.exhaustive
def test_an_agent_asks_the_engine_of_vllm(tmp_path: Path) -> None:
    needs_vllm()
    vllm = {
        "policy.generation.backend": "vllm",
        "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
        "policy.generation.vllm_cfg.num_threads": 1,
    }
    run(build_tiny(tmp_path / "tiny", head_dim=32), tmp_path / "run", **vllm)
    logged = metrics_of(tmp_path / "run" / "logs")
    assert logged[3]["train/environments/mine/gateway/requests"] == 3
    assert logged[1]["train/token_mult_prob_error"] < 1.001
    check_nothing_is_left(tmp_path / "run")


@pytest.mark.exhaustive
def test_nothing_of_an_agent_is_left_after_ctrl_c(tiny: Path, tmp_path: Path) -> None:
    command = ["sh", "-c", f'sleep 600 & python3 -c "{SLEEPER}"']
    options = {"env.mine.agent": ..., "env.mine.command": command}

    running = begin(tiny, tmp_path, before=Interruptible({MARK: str(tmp_path)}), **options)
    deadline = time.monotonic() + 90
    while describe_processes(find_processes(str(tmp_path))).count("sleep 600") < 2:
        assert time.monotonic() < deadline and running.process.is_alive(), (tmp_path / ".err").read_text()
        time.sleep(0.1)
    assert running.process.pid is not None
    os.kill(running.process.pid, signal.SIGINT)
    outcome = running.finish(30)
    assert outcome.code == 130 and "Traceback" not in outcome.err
    check_nothing_is_left(tmp_path)

"""What a forked engine is given of the process that starts it."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strop.generation.generation_config import GenerationConfig
from strop.generation.vllm import vllm_engine
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.launch import (
    SPIN_SECONDS,
    ForkedEngineCore,
    end_without_collecting,
    fork_engine_cores,
    shorten_spins,
)
from strop.generation.vllm.vllm_engine import VllmEngine
from support.forks import forks


def test_a_core_is_sent_with_the_environment_of_that_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = ForkedEngineCore(tmp_path / "engine_0.log")
    monkeypatch.setenv("SET_AFTER_IT_WAS_MADE", "1")
    arrived = pickle.loads(pickle.dumps(core))
    assert arrived.output == tmp_path / "engine_0.log"
    assert arrived.environment == dict(os.environ) and arrived.environment["SET_AFTER_IT_WAS_MADE"] == "1"


def test_vllm_starts_its_processes_as_ever_afterwards() -> None:
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    before = utils.get_mp_context, EngineCoreProc.run_engine_core
    with pytest.raises(KeyError), fork_engine_cores(None):
        assert isinstance(EngineCoreProc.run_engine_core, ForkedEngineCore)
        assert utils.get_mp_context().get_start_method() == "forkserver"
        raise KeyError
    assert (utils.get_mp_context, EngineCoreProc.run_engine_core) == before


def test_processes_of_an_engine_that_wait_for_each_other_soon_sleep(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    condition = shm_broadcast.SpinCondition
    assert inspect.signature(condition.__init__).parameters["busy_loop_s"].default > SPIN_SECONDS, "it is still needed"

    def initialize(self: Any, seconds: float) -> None:
        self.busy_loop_s = seconds

    monkeypatch.setattr(condition, "__init__", initialize)  # which needs sockets
    shorten_spins()
    assert [condition(seconds).busy_loop_s for seconds in (1.0, 0)] == [SPIN_SECONDS, 0], "a writer never spins"
    assert not caplog.records
    monkeypatch.delattr(shm_broadcast, "SpinCondition")
    shorten_spins()
    assert "takes cores from the learner" in caplog.text


def count_what_stays_frozen(answers: Any) -> None:
    """In a process of the server of engines."""
    end_without_collecting()
    gc.unfreeze()  # as vLLM does when it ends
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import _registry

    before = dict(_registry)
    current_platform.register_triton_kernel_overrides()
    answers.send((gc.get_freeze_count(), len(before), _registry == before, "torch._inductor.compile_fx" in sys.modules))


def test_what_the_server_read_and_made_is_neither_searched_nor_made_again_by_its_forks() -> None:
    answers, answer = multiprocessing.Pipe(duplex=False)
    process = forks().Process(target=count_what_stays_frozen, args=(answer,))
    process.start()
    frozen, kernels, as_they_were, compiles = answers.recv()
    process.join()
    assert frozen > 100_000
    assert kernels > 0 and as_they_were, "Triton's kernels are replaced, once"
    assert compiles


def test_engines_of_one_process_get_ready_at_once_and_each_is_launched_with_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.v1.engine import async_llm, core_client

    launched: list[tuple[str, str]] = []
    all_run = threading.Barrier(2)  # nobody passes before the processes of both engines run

    @contextmanager
    def launch() -> Iterator[None]:
        python = multiprocessing.spawn.get_executable()
        launched.append((os.environ["CUDA_VISIBLE_DEVICES"], Path(os.fsdecode(python)).read_text()))
        yield
        all_run.wait(10)
        assert Path(os.fsdecode(python)).exists(), "a process that was started by it may still read it"

    def from_engine_args(*_: Any, **__: Any) -> str:
        with core_client.launch_core_engines():
            pass
        return "ready"

    monkeypatch.setattr(core_client, "launch_core_engines", launch)
    monkeypatch.setattr(async_llm.AsyncLLM, "from_engine_args", from_engine_args)
    monkeypatch.setattr(vllm_engine, "make_engine_args", lambda launch: None)
    before = dict(os.environ), multiprocessing.spawn.get_executable()
    engines = [
        VllmEngine(
            f"engine {number}",
            VllmLaunch(
                config=GenerationConfig(backend="vllm"),
                model="folder",
                on_cpu=False,
                environment={"CUDA_VISIBLE_DEVICES": str(number)},
                output_file=tmp_path / f"engine_{number}.log",
            ),
            None,
            stop_ids=(),
        )
        for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda engine: engine._start(), engines)) == ["ready", "ready"]
    for number, (gpu, script) in enumerate(sorted(launched)):
        assert gpu == str(number) and f"engine_{number}.log" in script
    assert (dict(os.environ), multiprocessing.spawn.get_executable()) == before
    assert core_client.launch_core_engines is launch

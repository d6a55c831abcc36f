"""What a forked engine is given of the process that starts it."""

from __future__ import annotations

import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from strop.generation.vllm.launch import SPIN_SECONDS, ForkedEngineCore, fork_engine_cores, shorten_spins


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

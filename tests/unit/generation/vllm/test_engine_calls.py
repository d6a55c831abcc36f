"""What becomes of a call to an engine's processes when they die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from strop.generation.generation_config import GenerationConfig
from strop.generation.vllm import vllm_engine
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.vllm_engine import VllmEngine
from strop.weight_sync.base import EngineDied


class Core:
    """Stands for vLLM's front end, which notices a death ``seconds`` after the call began."""

    errored = False

    async def call(self, result: Any = None, *, dies_after: float | None = None, hangs: bool = False) -> Any:
        if dies_after is not None:
            asyncio.get_running_loop().call_later(dies_after, setattr, self, "errored", True)
        if hangs:
            await asyncio.sleep(100)
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VllmEngine:
    monkeypatch.setattr(vllm_engine, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(vllm_engine, "SHUTDOWN_SECONDS", 0.2)
    (tmp_path / "engine.log").write_text("the last words\n")
    launch = VllmLaunch(config=GenerationConfig(), model=str(tmp_path), on_cpu=True, output_file=tmp_path / "engine.log")
    engine = VllmEngine("engine 0", launch, None, stop_ids=())
    engine._engine = Core()
    return engine


def call(engine: VllmEngine, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        return await engine._await_call(engine._engine.call(*arguments, **options), "while pausing")

    return asyncio.run(run())


def test_a_call_returns_its_result_and_raises_its_error(engine: VllmEngine) -> None:
    assert call(engine, 3) == 3
    with pytest.raises(ValueError, match="a wrong shape"):
        call(engine, ValueError("a wrong shape"))


@pytest.mark.parametrize(
    ("result", "options"),
    [
        (EngineDeadError(), {}),
        (None, {"dies_after": 0.05, "hangs": True}),
        (Exception("Server shutting down"), {"dies_after": 0.05}),
    ],
    ids=["vLLM says so", "it never returns", "it fails just before"],
)
def test_a_death_during_a_call_is_told_in_one_way(engine: VllmEngine, result: Any, options: dict[str, Any]) -> None:
    with pytest.raises(EngineDied, match=r"^engine 0: its process died while pausing; the end of .*:\n  the last words$"):
        call(engine, result, **options)

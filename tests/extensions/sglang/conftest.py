"""Tests with a real server are marked exhaustive and need an interpreter with SGLang: `make test-sglang`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


@pytest.fixture(scope="session")
def room() -> Iterator[BackgroundLoop]:
    from support.vllm_engines import BackgroundLoop

    room = BackgroundLoop()
    yield room
    room.close()


@pytest.fixture(scope="session")
def served(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    """One engine in float32, whose weights can be told to go wrong, with weights published once. Tests leave it in order."""
    from support.sglang_engines import LIMIT, make_sglang_engine
    from support.vllm_engines import save_model_folder, serve, served_model

    model = served_model()
    folder = save_model_folder(model, tokenizer, tmp_path_factory.mktemp("served"))
    served = serve(model, tokenizer, [make_sglang_engine(folder, tokenizer, faulty=True)])
    try:
        room.run(served.weights.publish(0), seconds=LIMIT)
        yield served
    finally:
        room.run(served.close())


@pytest.fixture
def published(room: BackgroundLoop, served: ServedModel) -> None:
    from support.engine_contract import publish

    publish(room, served)

"""vLLM is installed by `make setup-vllm`, which `make setup-dev` does too; where it is not, these tests say so and are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.forks import with_vllm
from support.needs import needs_vllm

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

needs_vllm()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Engines are forks of a server that has imported vLLM, whatever server the tests of other folders have."""
    with with_vllm():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with with_vllm():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    from strop.generation.vllm.vllm_engine import import_vllm

    import_vllm()


@pytest.fixture(scope="session")
def room() -> Iterator[BackgroundLoop]:
    from support.vllm_engines import BackgroundLoop

    room = BackgroundLoop()
    yield room
    room.close()


@pytest.fixture(scope="session")
def served(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    """One engine in float32, whose worker can be told to go wrong, with weights published once. Tests leave it in order."""
    from support.vllm_engines import FAULTY, serve_vllm, served_model

    served = serve_vllm(served_model(), tokenizer, tmp_path_factory.mktemp("served"), worker_extension=FAULTY)
    room.run(served.weights.publish(0))
    yield served
    room.run(served.close())


@pytest.fixture
def published(served: ServedModel) -> None:
    """The weights of ``served`` were published as it was made, and tests of sampling leave them alone."""

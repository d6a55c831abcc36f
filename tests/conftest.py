"""Shared by all tests: one thread, helpers under ``support``, and a tiny model with its tokenizer in a folder."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from strop.openmp import openmp_variables

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tiny models lose more by sharing work than they gain
os.environ.update(openmp_variables())
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts its background jobs that way, and tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent))  # so that tests import their helpers as ``support``
if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    from support.files_in_memory import choose_root

    if (root := choose_root()) is not None:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)
settings.register_profile("strop", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # workers share the cores
settings.load_profile("strop")
gc.disable()  # until all is collected: it would go through a million objects that stay, again and again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated-gpu", action="store_true", help="run tests/gpu on the simulated GPU (tests/support/simulated_device)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.simulated_gpu:
        from support.simulated_device.in_process import take_simulated_gpu

        take_simulated_gpu()
    if not hasattr(config, "workerinput") and (file := os.environ.pop("STROP_NEED_EXTENSIONS", "")):
        config.pluginmanager.register(NeedExtensions(Path(file)))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from support.tokenizer import build_tokenizer

    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny Llama and its tokenizer as ``from_pretrained`` reads them."""
    from support.models import build

    folder = tmp_path_factory.mktemp("tiny-llama")
    build("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def interpreter() -> Iterator[str]:
    """The path of a Python whose processes are forks with torch, transformers and Strop imported (``support.forked_interpreter``)."""
    from support.forked_interpreter import forked_interpreter

    with forked_interpreter() as path:
        yield path


@pytest.fixture(scope="module")
def workers_are_forks(interpreter: str) -> Iterator[None]:
    """What is started by ``sys.executable`` begins as such a fork: Ray's workers, and those that tokenize."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", interpreter)
        yield


@pytest.fixture
def local_hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of local copies of the hub's data sets, which are read in place of the hub during the test."""
    from support.hub import use_local_hub

    return use_local_hub(monkeypatch, tmp_path_factory.mktemp("datasets-cache"))


@pytest.fixture(scope="session", autouse=True)
def clusters_of_its_own() -> Iterator[None]:
    """Strop joins a Ray cluster that was started on this machine: not one of another worker. Ray's sockets want a short path."""
    folder = tempfile.mkdtemp(prefix="strop-ray-", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    os.environ.update(RAY_prestart_worker_first_driver="0")  # a process for each core, which no test uses
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def what_is_here_stays() -> Iterator[None]:
    """What the tests of a file have imported and made for others: garbage is not looked for among it by those that follow."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where pytest runs with ``-n``."""
    from support.schedule import FileByFile

    return FileByFile(config, log)


def pytest_collection_finish() -> None:
    """What has been imported and collected stays until the end: garbage is not looked for among it, again and again.

    As the interpreter ends it clears what is left, and libraries say of frozen objects that they leaked.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # after pytest's own last searches for garbage


class NeedExtensions:
    """Lists the tests that are skipped where Strop has no extensions, in a file (``tests/core_alone.py``)."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._list(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._list(report)

    def _list(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reasons = ("Strop's extensions are not here", "could not import 'strop.extensions", "is an extension's")
        if report.skipped and any(reason in str(report.longrepr) for reason in reasons):
            with self.file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where exhaustive tests are left out, properties are tried with fewer examples. Tests under gpu/ need a CUDA device, or are to run on
    the simulated one."""
    if "not exhaustive" in config.option.markexpr:
        from support.sweep import draw_fewer_examples

        for item in items:
            draw_fewer_examples(item)
    if find_spec("strop.extensions") is None:
        for item in items:
            if item.get_closest_marker("extensions"):
                item.add_marker(pytest.mark.skip(reason="Strop's extensions are not here"))
    wanted = [item for item in items if "gpu" in item.path.parts or item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    for item in wanted:
        item.add_marker(pytest.mark.gpu)
        if config.option.simulated_gpu:
            from support.simulated_device.not_simulated import find_reason

            if (reason := find_reason(item.path.name, item.name)) is not None:
                item.add_marker(pytest.mark.skip(reason=f"not simulated: {reason}"))
        elif not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

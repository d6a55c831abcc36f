"""An image, and a provider of sandboxes of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.extensions.sandboxes.local.local_provider import LocalOptions, LocalProvider
from support.oci_images import programs_layer, write_layout


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference of an image with a shell and a few programs."""
    return write_layout(tmp_path_factory.mktemp("image"), [programs_layer()])


@pytest.fixture(scope="session")
def make_local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LocalProvider]:
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap, which `make setup-sandbox` installs")
    folder = tmp_path_factory.mktemp("images")
    return lambda: LocalProvider(LocalOptions(folder=str(folder)))


@pytest.fixture
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s"  # short: the path of a socket has at most 107 bytes

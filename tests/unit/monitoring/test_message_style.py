"""One style for all warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from strop.monitoring.message_style import MessageHandler, show_warning


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """A root logger with the handler alone."""
    logger = logging.getLogger()
    kept, logger.handlers = logger.handlers, [MessageHandler()]
    yield logger
    logger.handlers = kept


def test_loggers_of_strop_and_of_others_warn_in_one_style(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("strop.models.value_network").warning("the head of %s is new", "x")
    for _ in range(2):
        logging.getLogger("engines.triton_utils.importing").warning("Triton is installed")
    logging.getLogger("cluster.nodes").error("lost a node")
    assert capsys.readouterr().err.splitlines() == [
        "warning: the head of x is new",
        "warning (engines): Triton is installed",
        "error (cluster): lost a node",
    ]


def test_a_warning_of_python_says_which_package_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    show_warning("slow", UserWarning, "/usr/lib/python3/site-packages/torch/nn/functional.py", 3)
    show_warning("unused key", UserWarning, "/home/me/reward.py", 3)
    assert capsys.readouterr().err.splitlines() == ["warning (torch): slow", "warning: unused key"]

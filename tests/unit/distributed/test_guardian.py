"""What was started with a cluster's mark ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.distributed.guardian import MARK_VARIABLE, Guardian
from support.processes import is_alive, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc to find processes in")

STARTS_ONE = """
import subprocess, sys, time
from strop.distributed.guardian import Guardian
guardian = Guardian()
with guardian.mark_children():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_closing_ends_what_was_started_with_the_mark_and_nothing_else() -> None:
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    guardian = Guardian()
    with guardian.mark_children():
        marked = subprocess.Popen(asleep)
    other = subprocess.Popen(asleep)
    assert MARK_VARIABLE not in os.environ
    guardian.close()
    assert marked.wait(10) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_driver_that_is_killed_leaves_nothing_that_had_the_mark() -> None:
    driver = subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    assert wait_until(lambda: not is_alive(child))

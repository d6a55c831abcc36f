"""A real vLLM, as for the tests of its engine."""

from __future__ import annotations

from unit.generation.vllm.conftest import imported as imported
from unit.generation.vllm.conftest import pytest_runtest_call as pytest_runtest_call
from unit.generation.vllm.conftest import pytest_runtest_setup as pytest_runtest_setup
from unit.generation.vllm.conftest import room as room

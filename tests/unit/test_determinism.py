"""What a process needs for runs that are equal to the last bit on a GPU, and whether it gets it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from strop.determinism import ENVIRONMENT, deterministic_variables, running_sums, set_deterministic
from strop.generation.generation_config import GenerationConfig
from strop.generation.vllm.engine_args import VllmLaunch
from strop.runs.models import prepare_device


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    set_deterministic(False)


def test_a_process_and_what_it_starts_compute_deterministically_until_it_is_switched_off(interpreter: str) -> None:
    assert not deterministic_variables()
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory, "a pass over all new memory"
    assert deterministic_variables() == ENVIRONMENT
    code = (
        "from strop.runs.models import prepare_device; import torch, os; prepare_device('cpu', None); "
        "print(torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'], torch.cuda.is_initialized())"
    )
    found = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["True", ":4096:8", "False"]
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled() and not ENVIRONMENT.keys() & os.environ.keys()
    prepare_device("cpu", None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_variables_that_a_user_set_stay_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_gpu_that_was_used_before_with_other_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="set it to :4096:8 before the first use of the GPU"):
        set_deterministic(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(True)


class OnAGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU, where torch refuses to sum it up."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]
    rows: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        if function is torch.Tensor.cumsum:
            assert not torch.are_deterministic_algorithms_enabled(), "cumsum does not have a deterministic implementation"
            cls.rows.append(arguments[0].numel() // arguments[0].shape[-1])
        return super().__torch_function__(function, types, arguments, keywords or {})


def test_running_sums_are_those_of_torch_and_a_single_row_is_never_summed_alone() -> None:
    torch.manual_seed(0)
    OnAGpu.rows = []
    for shape in ((1, 300), (3, 300), (300,), (2, 2, 7)):
        values = torch.rand(shape)
        expected = values.cumsum(-1)
        set_deterministic(True)
        assert torch.equal(running_sums(values), expected)
        found = running_sums(values.as_subclass(OnAGpu))
        assert torch.equal(found.as_subclass(torch.Tensor), expected)
        assert torch.are_deterministic_algorithms_enabled(), "and it is switched on again"
        set_deterministic(False)
    assert OnAGpu.rows == [2, 3, 2, 4]


def test_engines_of_a_deterministic_run_are_batch_invariant_over_ray_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from strop.runs.cluster.ray_backend import RayBackend

    monkeypatch.setattr("strop.runs.engines.fixes_order", lambda policy: False)

    def environment(*, deterministic: bool, on_cpu: bool) -> dict[str, str]:
        backend = object.__new__(RayBackend)
        generation = GenerationConfig(backend="vllm")
        policy = SimpleNamespace(
            generation=generation,
            adapter_rank=None,
            router_replay=SimpleNamespace(enabled=False),
            deterministic=deterministic,
            sends_draft=False,
        )
        backend.config = SimpleNamespace(policy=policy)  # type: ignore[assignment]
        backend.policy_info = SimpleNamespace(on_cpu=on_cpu)  # type: ignore[assignment]
        backend.bundle = SimpleNamespace(template=SimpleNamespace(vision=None))  # type: ignore[assignment]
        launched: list[VllmLaunch] = []
        vars(backend)["thread_env"] = lambda *arguments, **options: {}
        vars(backend)["_make_launched_engine"] = lambda number, slot, launch: launched.append(launch)
        backend._launch_engine(0, SimpleNamespace(further=()), Path("folder"), Path("outputs"), False)  # type: ignore[arg-type]
        return launched[0].env_vars

    assert environment(deterministic=True, on_cpu=False)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment(deterministic=False, on_cpu=False)
    assert "VLLM_BATCH_INVARIANT" not in environment(deterministic=True, on_cpu=True), "a CPU has no such mode"

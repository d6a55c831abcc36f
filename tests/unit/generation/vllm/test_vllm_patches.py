"""What vLLM's CPU build does wrong, and Strop's workers put right."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.sampling import Sampling

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


def test_values_of_requests_are_expanded_to_their_drafts() -> None:
    from strop.generation.vllm.vllm_patches import expand_batch_to_tokens

    temperatures = torch.tensor([0.6, 0.0, 1.5])
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert (
        expand_batch_to_tokens(temperatures, ends, 5, replace_to=1).tolist() == torch.tensor([0.6, 0.6, 1.5, 1.5, 1.5]).tolist()
    )
    assert expand_batch_to_tokens(torch.tensor([0.0, 7.0]), torch.tensor([1, 2]), 2, replace_to=1).tolist() == [1.0, 7.0]
    assert expand_batch_to_tokens(temperatures, torch.zeros(3, dtype=torch.int32), 0).tolist() == []


def test_heads_are_joined_to_rows_for_the_kernel_of_rotary_positions() -> None:
    from strop.generation.vllm.vllm_patches import join_heads

    states = torch.arange(24.0).view(2, 3, 4)
    assert join_heads(states).data_ptr() == states.data_ptr() and join_heads(states).shape == (2, 12)
    assert join_heads(states[..., 2:]).tolist() == [[2, 3, 6, 7, 10, 11], [14, 15, 18, 19, 22, 23]]
    assert join_heads(states[0]).shape == (3, 4)


@pytest.mark.slow
def test_prompts_that_are_read_in_pieces_give_the_tokens_of_their_seeds(room: BackgroundLoop, served: ServedModel) -> None:
    """More prompt tokens at once than a step reads: some prompts are cut, which ends an engine that is not repaired."""
    sampling = Sampling(max_new_tokens=6)
    noise = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 300, (230,), generator=noise).tolist() for _ in range(60)]

    async def together() -> list[list[int]]:
        requests = [served.pool.generate(prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
        return [completion.tokens.tolist() for completion in await asyncio.gather(*requests)]

    restarts = served.pool.restarts
    at_once = room.run(together())
    assert served.pool.restarts == restarts
    for seed, prompt in enumerate(prompts[::10]):
        alone = room.run(served.pool.generate(prompt, sampling=sampling, seed=10 * seed)).tokens.tolist()
        assert alone == at_once[10 * seed]


def raises(error: Exception) -> Callable[[], None]:
    def apply() -> None:
        raise error

    return apply


def test_a_patch_that_does_not_fit_refuses_the_version_and_names_those_that_do(caplog: pytest.LogCaptureFixture) -> None:
    from strop.generation.vllm.vllm_patches import VllmPatch, apply_patch

    missing = raises(AttributeError("no attribute 'sample'"))
    patch = VllmPatch(bug="it crashes", apply=missing, checked=("0.32.0",))
    with pytest.raises(RuntimeError, match=r"vLLM 0\.40\.0 lacks .*it crashes.*tested with, 0\.32\.0 \(constraints"):
        apply_patch(patch, "0.40.0")
    assert "was tested only with 0.32.0" in caplog.text
    caplog.clear()
    apply_patch(VllmPatch(bug="drafts", apply=missing, checked=("0.32.0",), only_drafts=True), "0.40.0")
    assert "it is not applied" in caplog.text
    caplog.clear()
    apply_patch(VllmPatch(bug="it crashes", apply=lambda: None, checked=("0.32.0",)), "0.32.0")
    assert not caplog.text


def test_every_patch_was_checked_with_the_pinned_versions() -> None:
    from strop.generation.vllm.vllm_config import CHECKED_VERSIONS
    from strop.generation.vllm.vllm_patches import PATCHES

    assert all(set(patch.checked) == set(CHECKED_VERSIONS) for patch in PATCHES)


@pytest.mark.slow
def test_a_draft_model_is_loaded_as_drafts_are_in_model_runner_v2_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

    from strop.generation.vllm.vllm_patches import PATCHES

    assert "load_config" not in inspect.getsource(speculator.StandaloneARSpeculator.load_draft_model), "it is no longer needed"
    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(speculator, "get_model", lambda **options: loaded.append(options))
    (patch,) = [each for each in PATCHES if "runner V2" in each.bug]
    assert patch.platform == "gpu" and patch.only_drafts, "a CPU has model runner V1"
    patch.apply()
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_load_config="auto"), load_config="dummy")
    speculator.get_model(vllm_config=config, prefix="draft_model")
    assert loaded == [{"vllm_config": config, "load_config": "auto", "prefix": "draft_model"}]


def test_the_drafter_is_found_in_both_model_runners() -> None:
    from strop.generation.vllm.worker import _drafter

    v1, v2 = SimpleNamespace(drafter=SimpleNamespace(model="V1's")), SimpleNamespace(get_draft_model=lambda: "V2's")
    assert (_drafter(v1), _drafter(v2)) == ("V1's", "V2's")
    for without in (SimpleNamespace(), SimpleNamespace(drafter=None), SimpleNamespace(get_draft_model=lambda: None)):
        with pytest.raises(RuntimeError, match="this engine has no drafter"):
            _drafter(without)


def test_what_a_worker_asks_of_vllm_s_model_runner_is_there_in_v1_and_in_v2() -> None:
    """Read in their sources: V2 has never run here, as it needs a GPU."""
    import vllm

    for path in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        source = (Path(vllm.__file__).parent / path).read_text()
        for method in ("get_model", "get_draft_model", "reload_weights"):
            assert re.search(rf"^    def {method}\(", source, re.MULTILINE), (path, method)
        assert re.search(r"^class GPUModelRunner\((\n    )?LoRAModelRunnerMixin", source, re.MULTILINE), path
        for attribute in ("vllm_config", "device"):
            assert f"self.{attribute} = " in source, (path, attribute)
    shared = (Path(vllm.__file__).parent / "v1/worker/lora_model_runner_mixin.py").read_text()
    assert "self.lora_manager = " in shared

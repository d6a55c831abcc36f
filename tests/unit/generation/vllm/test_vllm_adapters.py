"""Low-rank adapters sent alone to a real vLLM engine, over a base that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.weight_sync.exporter import LocalAdapterSource
from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import (  # noqa: F401
    ADAPTED,
    PROMPT,
    RANK,
    disagreement,
    move,
    planted,
    publish,
    test_requests_that_run_go_on_with_the_new_adapters,
    test_the_base_is_sent_once_and_the_adapters_each_time,
)
from support.lora import with_random_adapters
from support.vllm_engines import compute_logprobs

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = pytest.mark.slow


def serve_adapters(
    room: BackgroundLoop,
    folder: Path,
    tokenizer: Any,
    *,
    tolerance: float = 0.002,
    lora: dict[str, Any] | None = None,
    **changes: Any,
) -> ServedModel:
    from support.vllm_engines import FAULTY, serve_vllm, served_model

    model = with_random_adapters(served_model(), **{"dim": RANK, "alpha": 8, "spread": 0.1, **(lora or {})})
    keys = {"worker_extension": FAULTY, "max_lora_rank": RANK, **changes}
    served = serve_vllm(model, tokenizer, folder, adapters=LocalAdapterSource(model), tolerance=tolerance, **keys)
    room.run(served.weights.publish(0))
    return served


@pytest.fixture(scope="module")
def beside(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    served = serve_adapters(room, tmp_path_factory.mktemp("beside"), tokenizer)
    yield served
    room.run(served.close())


@pytest.mark.exhaustive
def test_each_pipeline_stage_has_the_adapters_of_its_own_layers(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    served = serve_adapters(room, tmp_path, tokenizer, pipeline_parallel_size=2)
    try:
        move(served.model, 1)
        said = publish(room, served)
        assert said["weights/tensors_not_read_back"] == 0
        completion = room.run(served.pool.generate(PROMPT, sampling=ADAPTED, seed=1))
        expected = compute_logprobs(served.model, PROMPT, completion.tokens, ADAPTED)
        assert float((completion.logprobs - expected).abs().max()) < 2e-4
    finally:
        room.run(served.close())


def test_adapters_are_read_back_as_the_learner_has_them(room: BackgroundLoop, beside: ServedModel) -> None:
    held = room.run(beside.engine._read_back("strop_read_adapter_fingerprints", 1))
    marks = LocalAdapterSource(beside.model).fingerprints(torch.float32)
    assert {name: part.value for name, (part,) in held.items()} == marks


def test_an_adapter_that_is_not_replaced_is_caught(
    room: BackgroundLoop, beside: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers that it has the adapter, and means the one of before."""
    from vllm.lora.request import LoRARequest

    engine = beside.engine._engine
    add = engine.add_lora

    async def keeps_the_old_one(asked: LoRARequest) -> bool:
        return bool(await add(LoRARequest(asked.lora_name, asked.lora_int_id, asked.lora_path)))

    with monkeypatch.context() as patched:
        patched.setattr(engine, "add_lora", keeps_the_old_one)
        move(beside.model, 21)
        with pytest.raises(VerificationFailed, match=r"self_attn\.q_proj\.[AB] did not arrive"):
            publish(room, beside)
    publish(room, beside)
    assert disagreement(room, beside, ADAPTED) < 2e-4


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("adapter forgotten", r"did not load model\.layers\.0\.self_attn\.q_proj\.A"),
        ("stale adapter in one layer", r"layers\.1\.mlp\.down_proj\.B did not arrive"),
    ],
)
def test_a_worker_without_the_adapter_is_caught_and_the_matrix_named(
    room: BackgroundLoop, beside: ServedModel, fault: str, named: str
) -> None:
    move(beside.model, 31)
    with planted(room, beside, fault), pytest.raises(VerificationFailed, match=named):
        publish(room, beside)


def test_requests_that_go_without_the_adapter_are_caught_by_the_canary(
    room: BackgroundLoop, beside: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = beside.engine.load_adapter

    async def forgets_to_use_it(*arguments: Any) -> Any:
        receipt = await load(*arguments)
        beside.engine._delete_adapter_files()
        return receipt

    with monkeypatch.context() as patched:
        patched.setattr(beside.engine, "load_adapter", forgets_to_use_it)
        with pytest.raises(VerificationFailed, match=r"disagree on the canary.*adapter may not be applied"):
            publish(room, beside)
    publish(room, beside)
    assert disagreement(room, beside, ADAPTED) < 2e-4


@pytest.mark.exhaustive
def test_bfloat16_engines_hold_the_adapters_as_they_were_rounded(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    """Some layers only, on the scale of rsLoRA."""
    lora = {"target_modules": ("q_proj", "v_proj", "down_proj"), "use_rslora": True}
    served = serve_adapters(room, tmp_path, tokenizer, tolerance=0.3, lora=lora, precision="bfloat16")
    try:
        move(served.model, 3)
        said = publish(room, served)
        print(
            f"bfloat16: canary error {said['weights/canary_error']:.4f}, disagreement {disagreement(room, served, ADAPTED):.4f}"
        )
        held = room.run(served.engine._read_back("strop_read_adapter_fingerprints", 1))
        assert {name: part.value for name, (part,) in held.items()} == LocalAdapterSource(served.model).fingerprints(
            torch.bfloat16
        )
        assert disagreement(room, served, ADAPTED) < 0.5
    finally:
        room.run(served.close())


@pytest.mark.exhaustive
def test_two_ranks_hold_parts_of_the_adapters_that_add_up(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    served = serve_adapters(room, tmp_path, tokenizer, tensor_parallel_size=2)
    try:
        move(served.model, 3)
        publish(room, served)
        assert disagreement(room, served, ADAPTED) < 2e-4
        held = room.run(served.engine._read_back("strop_read_adapter_fingerprints", 1))
        layer = "model.layers.0"
        assert {part.region for part in held[f"{layer}.self_attn.q_proj.B"]} == {(0, 32, 0, RANK), (32, 32, 0, RANK)}
        assert {part.region for part in held[f"{layer}.mlp.down_proj.A"]} == {(0, RANK, 0, 48), (0, RANK, 48, 48)}
        with (
            planted(room, served, "stale adapter in one layer"),
            pytest.raises(VerificationFailed, match=r"down_proj\.B did not arrive"),
        ):
            publish(room, served)
    finally:
        room.run(served.close())

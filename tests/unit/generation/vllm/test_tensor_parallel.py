"""Real vLLM engines that cut the model over two processes: what each holds is read back, and adds up to what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import disagreement, planted, publish
from support.expert_models import SIZES, experts_family
from support.sweep import one_in
from support.vllm_engines import perturb

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = pytest.mark.slow


def family(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "qwen2":  # biases of q, k and v
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    elif name == "qwen3":  # norms of q and k
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=32))
    else:
        model = experts_family(name, transformers)
    model = model.eval()
    perturb(model, 1)
    return model


def serve_family(
    room: BackgroundLoop, name: str, folder: Path, tokenizer: Any, tolerance: float = 0.002, **changes: Any
) -> ServedModel:
    from support.vllm_engines import FAULTY, serve_vllm

    return serve_vllm(family(name), tokenizer, folder, tolerance=tolerance, worker_extension=FAULTY, **changes)


@pytest.fixture(scope="module")
def cut(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    served = serve_family(room, "qwen2", tmp_path_factory.mktemp("cut"), tokenizer, tensor_parallel_size=2)
    yield served
    room.run(served.close())


def test_two_ranks_take_every_publish_and_all_of_it_is_read_back(room: BackgroundLoop, cut: ServedModel) -> None:
    assert cut.engine.receivers == 2
    for seed in range(2):
        perturb(cut.model, seed)
        said = publish(room, cut)
        assert said["weights/tensors_read_back"] == len(cut.model.state_dict())
        assert said["weights/tensors_not_read_back"] == 0
        assert disagreement(room, cut) < 2e-4


def test_ranks_hold_regions_of_the_whole(room: BackgroundLoop, cut: ServedModel) -> None:
    if cut.weights.version < 0:
        publish(room, cut)
    held = room.run(cut.engine.read_back_fingerprints())
    layer = "model.layers.0"
    assert {part.region for part in held[f"{layer}.self_attn.q_proj.weight"]} == {(0, 64, 0, 128), (64, 64, 0, 128)}
    assert {part.region for part in held[f"{layer}.self_attn.k_proj.weight"]} == {(0, 32, 0, 128)}, "one head on both ranks"
    assert {part.region for part in held[f"{layer}.self_attn.o_proj.weight"]} == {(0, 128, 0, 64), (0, 128, 64, 64)}
    assert {part.region for part in held[f"{layer}.mlp.up_proj.weight"]} == {(0, 96, 0, 128), (96, 96, 0, 128)}
    assert {part.region for part in held["lm_head.weight"]} == {(0, 160, 0, 128), (160, 147, 0, 128)}
    assert {part.region for part in held[f"{layer}.self_attn.q_proj.bias"]} == {(0, 64, 0, 1), (64, 64, 0, 1)}


@pytest.mark.parametrize("name", one_in(2, ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"]))
def test_a_tensor_that_one_rank_alone_did_not_update_is_caught(room: BackgroundLoop, cut: ServedModel, name: str) -> None:
    perturb(cut.model, 31)
    with planted(room, cut, f"second rank drops {name}"), pytest.raises(VerificationFailed, match=name.replace(".", r"\.")):
        publish(room, cut)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_other_families_are_read_back_too(room: BackgroundLoop, name: str, tmp_path: Path, tokenizer: Any) -> None:
    served = serve_family(room, name, tmp_path, tokenizer)
    try:
        said = publish(room, served)
        perturb(served.model, 3)
        said = publish(room, served)
        assert disagreement(room, served) < 2e-4
        assert said["weights/tensors_not_read_back"] == 0
        assert said["weights/tensors_read_back"] == len(served.model.state_dict())
    finally:
        room.run(served.close())


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_divided_over_ranks_and_copies_are_read_back(
    room: BackgroundLoop, tensor: int, tmp_path: Path, tokenizer: Any
) -> None:
    """With tensor = 1 the two expert-parallel ranks are copies of the rest of the model, which share out the requests."""
    served = serve_family(room, "qwen3_moe", tmp_path, tokenizer, tensor_parallel_size=tensor, expert_parallel_size=2)
    try:
        assert served.engine.receivers == 2
        for seed in range(2):
            perturb(served.model, seed)
            assert publish(room, served)["weights/tensors_not_read_back"] == 0
            assert max(disagreement(room, served) for _ in range(4)) < 2e-4
        held = room.run(served.engine.read_back_fingerprints())["model.layers.1.mlp.experts.down_proj"]
        assert sorted(part.region[0] for part in held) == [0, 1, 2, 3], "each expert is on one of the two"
        room.run(served.engine._call_workers("plant", "expert keeps a weight 1"))
        with pytest.raises(VerificationFailed, match=r"expert [13] of model\.layers\.1\.mlp\.experts\.down_proj"):
            publish(room, served)
    finally:
        room.run(served.close())


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_wrong_weight_of_one_expert_is_caught_and_the_expert_named(
    room: BackgroundLoop, ranks: int, precision: str, tmp_path: Path, tokenizer: Any
) -> None:
    keys = {"tensor_parallel_size": ranks, "precision": precision}
    served = serve_family(room, "qwen3_moe", tmp_path, tokenizer, tolerance=0.3, **keys)
    try:
        assert publish(room, served)["weights/tensors_not_read_back"] == 0
        room.run(served.engine._call_workers("plant", "expert keeps a weight 2"))
        with pytest.raises(VerificationFailed, match=r"expert 2 of model\.layers\.1\.mlp\.experts\.down_proj"):
            publish(room, served)
        room.run(served.engine._call_workers("plant", ""))
        publish(room, served)
    finally:
        room.run(served.close())

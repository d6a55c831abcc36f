"""A vLLM engine with weights in FP8: its own layers for checkpoints in that format, on a CPU with a plain kernel, and emulated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.generation_config import RolloutQuantizationConfig
from strop.models.quantization.number_format import FP8_BLOCK, NUMBER_FORMATS
from strop.models.quantization.quantization_plan import make_plan
from strop.sampling import Sampling
from support.models import VOCABULARY
from support.tokenizer import END
from support.vllm_engines import compute_logprobs, perturb, serve_vllm

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = pytest.mark.exhaustive

PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(max_new_tokens=8)
MODES: dict[str, dict[str, Any]] = {
    "kernels": {
        "precision": "fp8",
        "worker_extension": "support.plain_fp8_kernel.PlainFp8Worker",
        "num_last_layers_in_bf16": 1,
        "quantization_ignored_layer_kws": ("o_proj",),
    },
    "sent quantised": {
        "precision": "fp8",
        "worker_extension": "support.plain_fp8_kernel.PlainFp8Worker",
        "quantization": RolloutQuantizationConfig(send_quantized=True),
    },
    "emulated": {"precision": "fp8", "quantization": RolloutQuantizationConfig(emulate=True)},
    "nvfp4": {"precision": "float32", "quantization": RolloutQuantizationConfig(format="nvfp4", emulate=True)},
}


def small_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes,
        vocab_size=VOCABULARY,
        num_hidden_layers=3,
        max_position_embeddings=512,
        eos_token_id=END,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module", params=MODES)
def quantized(
    request: pytest.FixtureRequest, room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any
) -> Iterator[tuple[str, ServedModel]]:
    served = serve_vllm(small_model(), tokenizer, tmp_path_factory.mktemp("fp8"), tolerance=0.5, **MODES[request.param])
    room.run(served.weights.publish(0))
    yield request.param, served
    room.run(served.close())


def rounded(model: Any, mode: str) -> Any:
    """The model with the weights that the engine has, in the engine's data type."""
    plan = make_plan(FP8_BLOCK, last_layers=1, ignored=("o_proj",)) if mode == "kernels" else make_plan(FP8_BLOCK)
    plan = make_plan(NUMBER_FORMATS["nvfp4"]) if mode == "nvfp4" else plan
    twin = copy.deepcopy(model) if mode == "nvfp4" else copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        for name in plan.select(name for name, _ in twin.named_parameters()):
            twin.get_parameter(name).copy_(plan.round_weight(twin.get_parameter(name)))
    return twin


def test_every_publish_reaches_the_layers_in_their_format(room: BackgroundLoop, quantized: tuple[str, ServedModel]) -> None:
    mode, served = quantized
    for seed in range(2):
        perturb(served.model, seed)
        published = room.run(served.weights.publish(served.weights.version + 1))
        assert published["weights/tensors_not_read_back"].value == 0
        completion = room.run(served.pool.generate(PROMPT, sampling=SAMPLING, seed=1))
        own = compute_logprobs(rounded(served.model, mode), PROMPT, completion.tokens, SAMPLING).float()
        unrounded = compute_logprobs(served.model, PROMPT, completion.tokens, SAMPLING)
        error, mismatch = ((completion.logprobs - each).abs().mean() for each in (own, unrounded))
        assert error < (1e-4 if mode == "nvfp4" else 0.02)
        assert error < 0.5 * mismatch, "it computes with the rounded weights, not with those of the learner"

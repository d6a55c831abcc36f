"""Families with their rotary embeddings in a real vLLM engine, beside Transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from strop.generation.vllm.vllm_engine import VllmEngine
from strop.models.attention.rotary_scaling import fix_rotary_length, fixed_rotary_config
from strop.sampling import Sampling
from strop.weight_sync.verification import CANARY_TOLERANCE
from support.every_family import LONGEST, build, logprobs_alone, relative
from support.tokenizer import build_tokenizer
from support.vllm_engines import BackgroundLoop, ServedModel, make_launch, save_model_folder, serve

# vLLM's CPU kernels want heads of at least 32.
WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
HEADS = {"head_dim": 32}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32}
SERVED: dict[tuple[str, str], dict[str, Any]] = {
    **{("llama", scaling): WIDE for scaling in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")},
    ("phi3", "longrope"): WIDE,
    ("qwen2", "default"): WIDE,
    ("qwen3", "dynamic"): WIDE | HEADS,
    ("qwen3_moe", "default"): WIDE | HEADS,
    ("gemma3", "default"): WIDE | HEADS | {"query_pre_attn_scalar": 32},
    ("mistral", "default"): WIDE,
    ("olmo2", "yarn"): WIDE,
    ("granite", "default"): WIDE,
    ("granite_hybrid", "default"): WIDE | MAMBA,
    ("falcon_h1", "default"): WIDE | HEADS | MAMBA | {"mamba_d_ssm": 128},
    ("lfm2", "default"): WIDE | {"conv_dim": 64, "block_dim": 64},  # both in the hub's config.json
}
# vLLM does not raise Mamba's time steps to time_step_min.
SERVED["nemotron_h", "default"] = {
    **WIDE, **HEADS, "mamba_num_heads": 4, "mamba_head_dim": 32, "layers_block_type": ["mamba", "mlp", "attention"], "time_step_min": 1e-9,
}  # fmt: skip
# vLLM's CPU build has the gated delta rule in bfloat16 only, with heads of 64 or 128.
DELTA = {**WIDE, **HEADS, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
STATES = ("granite_hybrid", "falcon_h1", "nemotron_h")  # whose layers' states its prefix cache cannot store


def serve_family(name: str, model: Any, folder: Path, *, precision: str = "float32", **options: Any) -> ServedModel:
    """Serve a model of a family by an engine that gets its weights as a run sends them."""
    tokenizer = build_tokenizer()
    save_model_folder(model, tokenizer, folder)
    keys: dict[str, Any] = {"max_model_len": LONGEST, "precision": precision, "enable_prefix_caching": name not in STATES}
    engine = VllmEngine("engine 0", make_launch(folder, **keys, **options), tokenizer, stop_ids=(2,))
    return serve(model, tokenizer, [engine], tolerance=CANARY_TOLERANCE[precision])


def compare_in_vllm(room: BackgroundLoop, name: str, scaling: str, folder: Path) -> float:
    """The largest difference of log-probabilities that vLLM sampled with, relative to the largest of Transformers alone.

    The engine is told the run's longest sequence as a run tells it, and gets its weights as a run sends them.
    """
    model, plain = (build(name, scaling, **SERVED[name, scaling]) for _ in range(2))
    fix_rotary_length(model, LONGEST)  # for the proof of the first publish
    for key, value in fixed_rotary_config(model.config, LONGEST).items():
        setattr(model.config, key, value)
    served = serve_family(name, model, folder)
    try:
        assert room.run(served.weights.publish(0))["weights/tensors_not_read_back"].number == 0
        read, found = [], []
        for prompt, length in (([5, 40, 200], 40), ([7, 90, 31] * 5, 5)):
            sampling = Sampling(max_new_tokens=length)
            completion = room.run(served.pool.generate(prompt, sampling=sampling, seed=len(prompt), session=""))
            read.append(([*prompt, *completion.tokens.tolist()], len(prompt)))
            found.append(completion.logprobs)
    finally:
        room.run(served.close())
    with torch.no_grad():
        return relative(torch.cat(found), logprobs_alone(plain, read))

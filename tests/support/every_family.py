"""Tiny random models of every family that was tried from outside, with every rotary embedding they take, beside Transformers alone.

The reference reads one sequence at a time, followed by tokens up to the longest sequence of the run: no token sees what comes after it, and
of the rotary embeddings that depend on a length Transformers then takes those that Strop takes for the whole run.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.generation.torch.model_runner import RecomputeRunner
from strop.generation.torch.torch_engine import find_cache_obstacle
from strop.learner.torch.scorer import NetworkScorer
from strop.models.attention.rotary_scaling import fix_rotary_length
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.learners import make_torch_learner
from support.models import VOCABULARY, copy_gradients, largest_difference
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.torch_engine import Request, make_engine, make_paged_runner, make_runner, run_requests

ORIGINAL, LONGEST = 24, 96  # tokens
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"head_dim": 8}
FOUR = {"num_hidden_layers": 4}
LINEAR: dict[str, Any] = {
    "spread": 0.08, **HEADS, **FOUR, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
WINDOW = {"sliding_window": 7}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
TWICE = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip

LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
# 16 heads: with few, many scores are zeros, among which Transformers chooses by the width of the row.
INDEXED = {**ROUTED, **LATENT, "num_hidden_layers": 3, "index_topk": 6, "index_head_dim": 8, "index_n_heads": 16}

# Type -> its parameters. longrope's factors are as many as the frequencies.
SCALINGS: dict[str, Mapping[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}
ALL = tuple(SCALINGS)
BY_LAYER = tuple(name for name in ALL if name != "longrope")  # Transformers 5.19 fails on longrope of one type of layer


@dataclass(frozen=True)
class Family:
    """A configuration class of Transformers and its options beside the usual sizes."""

    config: str
    options: Mapping[str, Any]
    scalings: tuple[str, ...] = ALL  # that Transformers takes for it
    experts: bool = False
    usual: bool = True  # False: the options are all there are
    spread: float = 0.15  # of the weights: a delta rule amplifies what rounds in sums near zero


def family(
    config: str,
    scalings: tuple[str, ...] = ALL,
    *,
    experts: bool = False,
    spread: float = 0.15,
    **options: Any,
) -> Family:
    return Family(config, options, scalings, experts, spread=spread)


def own(config: str, *, experts: bool = False, **options: Any) -> Family:
    """A family whose configuration names sizes otherwise and rotates nothing."""
    return Family(config, {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, **options}, (), experts, usual=False)


FAMILIES: dict[str, Family] = {
    "llama": family("LlamaConfig"),
    "qwen2": family("Qwen2Config", tie_word_embeddings=True),
    "qwen3": family("Qwen3Config", **HEADS),
    "qwen3_moe": family("Qwen3MoeConfig", experts=True, **HEADS, **EXPERTS, decoder_sparse_step=1),
    "qwen3_next": family(
        "Qwen3NextConfig", (), experts=True, **LINEAR, **EXPERTS, shared_expert_intermediate_size=16, decoder_sparse_step=1
    ),
    "qwen3_5": family("Qwen3_5TextConfig", (), **LINEAR),
    "qwen3_5_moe": family("Qwen3_5MoeTextConfig", (), experts=True, **LINEAR, **EXPERTS, shared_expert_intermediate_size=16),
    "lfm2_moe": family(
        "Lfm2MoeConfig", (), experts=True, **EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1
    ),
    "olmo_hybrid": family("OlmoHybridConfig", (), **LINEAR),
    "kimi_linear": family(
        "KimiLinearConfig", (), experts=True, **FOUR, **{**ROUTED, "num_key_value_heads": 4}, linear_num_heads=4, linear_head_dim=8,
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, num_experts=4, n_group=1, topk_group=1,
    ),
    "gemma2": family(
        "Gemma2Config", **HEADS, **WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "gemma3": family("Gemma3TextConfig", BY_LAYER, **HEADS, **WINDOW, **TWO_KINDS, query_pre_attn_scalar=8),
    "gemma3n": family(
        "Gemma3nTextConfig", (), **FOUR, **HEADS, **WINDOW, **TWICE, **LAYER_INPUTS, laurel_rank=4,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0], final_logit_softcapping=3.0,
    ),
    "gemma4": family(
        "Gemma4TextConfig", (), spread=0.08, **FOUR, **HEADS, **WINDOW, **TWICE, **LAYER_INPUTS, global_head_dim=16,
        use_double_wide_mlp=True, final_logit_softcapping=3.0,
    ),
    "gemma4_moe": family(
        "Gemma4TextConfig", (), experts=True, **FOUR, **HEADS, **WINDOW, **TWICE, global_head_dim=16,
        num_key_value_heads=4, num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24, use_bidirectional_attention="vision",
    ),
    "phi3": family("Phi3Config", ("longrope",), original_max_position_embeddings=ORIGINAL),
    "mistral": family("MistralConfig", **WINDOW),
    "ministral": family("MinistralConfig", **HEADS, **WINDOW, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "glm4": family("Glm4Config", **HEADS),
    "glm4_moe": family("Glm4MoeConfig", experts=True, **HEADS, **ROUTED, use_qk_norm=True),
    "deepseek_v3": family(
        "DeepseekV3Config", experts=True, **{**ROUTED, "moe_intermediate_size": 24}, **LATENT, n_group=2, topk_group=1
    ),
    "deepseek_v32": family("DeepseekV32Config", (), experts=True, **INDEXED, n_group=2, topk_group=1),
    "glm_moe_dsa": family("GlmMoeDsaConfig", (), experts=True, **INDEXED, indexer_types=["full", "shared", "full"]),
    "hy_v4": family("HYV4Config", (), experts=True, **INDEXED, head_dim=12, hc_mult=2, indexer_types=["full", "shared", "full"]),
    "axk2": family("AXK2Config", (), experts=True, **INDEXED, gated_norm_rank=4),
    "deepseek_v4": family(
        "DeepseekV4Config", (), spread=0.08, experts=True, **HEADS, **WINDOW, num_hidden_layers=4, num_key_value_heads=1,
        q_lora_rank=12, o_groups=2, o_lora_rank=8, partial_rotary_factor=0.5, index_n_heads=16, index_head_dim=8, index_topk=3,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, hc_mult=2, num_hash_layers=1,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        layer_types=["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
    ),
    "glm5_next": own(
        "Glm5NextConfig", experts=True,
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
        text_config={
            **SIZES, **ROUTED, **LATENT, **FOUR, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", *["sparse"] * 3],
            "layer_types": ["linear_attention", *["indexed_attention"] * 3], "indexer_types": ["full", "full", "full", "shared"],
            "index_topk": 8, "index_kpool": 4, "index_head_dim": 8, "index_n_heads": 16, "linear_num_heads": 4, "linear_head_dim": 8,
            "hc_mult": 2, "n_group": 1, "topk_group": 1,
        },
    ),
    "minimax_m3": family(
        "MiniMaxM3VLTextConfig", (), experts=True, **HEADS, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2,
        dense_intermediate_size=48, shared_intermediate_size=16, rotary_dim=4, index_n_heads=2, index_head_dim=8, index_block_size=4,
        index_topk_blocks=3, layer_types=["full_attention", *["minimax_m3_sparse"] * 2], mlp_layer_types=["dense", *["sparse"] * 2],
    ),
    "gpt_oss": family("GptOssConfig", experts=True, **HEADS, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "smollm3": family("SmolLM3Config", **FOUR, no_rope_layer_interval=2),
    "olmo2": family("Olmo2Config"),
    "olmo3": family("Olmo3Config", BY_LAYER, **FOUR, **WINDOW),
    "olmoe": family("OlmoeConfig", experts=True, num_experts=4, num_experts_per_tok=2),
    "granite": family(
        "GraniteConfig", embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.0078125
    ),
    "granite_hybrid": family(
        "GraniteMoeHybridConfig", (), experts=True, **MAMBA, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32,
        layer_types=["mamba", "attention"], position_embedding_type="nope",
    ),
    "falcon_h1": family("FalconH1Config", (), **MAMBA, mamba_d_ssm=64),
    "nemotron_h": family(
        "NemotronHConfig", (), experts=True, **HEADS, **FOUR, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=16, n_groups=1
    ),
    "nemotron": family("NemotronConfig"),
    "lfm2": family("Lfm2Config", (), layer_types=["conv", "full_attention"], block_multiple_of=8),
    "cohere2": family("Cohere2Config", **FOUR, **WINDOW, logit_scale=0.25),
    "exaone4": family("Exaone4Config", **FOUR, **WINDOW, sliding_window_pattern=4),
    "ernie4_5": family("Ernie4_5Config", **HEADS),
    "hunyuan": family("HunYuanDenseV1Config", ("linear", "yarn", "llama3"), **HEADS),
    "seed_oss": family("SeedOssConfig", **HEADS),
    "apertus": family("ApertusConfig"),
    "arcee": family("ArceeConfig"),
    "diffllama": family("DiffLlamaConfig"),
    "dots1": family("Dots1Config", experts=True, **HEADS, **ROUTED),
    "starcoder2": family("Starcoder2Config", **WINDOW),
    "stablelm": family("StableLmConfig", rope_parameters=HALF),
    "llama4": family(
        "Llama4TextConfig", ("linear", "yarn", "llama3"), experts=True, **FOUR, **HEADS, intermediate_size_mlp=64, num_local_experts=2,
        num_experts_per_tok=1, attention_chunk_size=8, no_rope_layers=[1, 1, 1, 0],
    ),
    "falcon": own(
        "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=True, num_kv_heads=2
    ),
    "gpt_neox": family("GPTNeoXConfig", num_key_value_heads=4, rope_parameters=HALF),
    "gpt2": own("GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "opt": own(
        "OPTConfig", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
        word_embed_proj_dim=32, pad_token_id=0,
    ),
    "bloom": own("BloomConfig", hidden_size=32, n_layer=2, n_head=4),
    "mamba2": own("Mamba2Config", hidden_size=32, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=8, expand=2, n_groups=1),
    "mamba": own("MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8),
    "falcon_mamba": own("FalconMambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8),
    "zamba": family(
        "ZambaConfig", (), **FOUR, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=8, n_mamba_heads=2,
        use_mamba_kernels=False,
    ),
    "zamba2": family(
        "Zamba2Config", (), **FOUR, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=16, mamba_ngroups=1,
        n_mamba_heads=8, mamba_headdim=8, use_mamba_kernels=False, num_mem_blocks=1, adapter_rank=4,
    ),
    "jamba": family(
        "JambaConfig", (), experts=True, **FOUR, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2,
        mamba_d_state=8, use_mamba_kernels=False,
    ),
    "bamba": family("BambaConfig", (), attn_layer_indices=[1], **MAMBA),
    "recurrent_gemma": family(
        "RecurrentGemmaConfig", (), lru_width=32, attention_window_size=7, block_types=["recurrent", "attention"]
    ),
    "minimax": family(
        "MiniMaxConfig", (), experts=True, **HEADS, num_local_experts=2, num_experts_per_tok=1, block_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
CASES = [(name, scaling) for name, each in FAMILIES.items() for scaling in ("default", *each.scalings)]


def make_config(name: str, scaling: str = "default", **changes: Any) -> Any:
    import transformers

    kind = FAMILIES[name]
    options = {**(SIZES if kind.usual else {}), **kind.options, **changes}
    config = getattr(transformers, kind.config)(**options)
    if scaling == "default":
        return config
    parameters = dict(config.rope_parameters)
    nested = {layer: dict(each) for layer, each in parameters.items() if isinstance(each, Mapping)}
    if nested:
        scaled = {**nested, "full_attention": scale(config, nested["full_attention"], scaling)}
    else:
        scaled = scale(config, parameters, scaling)
    longest = ORIGINAL if scaling == "dynamic" else 4 * ORIGINAL
    return getattr(transformers, kind.config)(**{**options, "rope_parameters": scaled, "max_position_embeddings": longest})


def scale(config: Any, parameters: Mapping[str, Any], scaling: str) -> dict[str, Any]:
    found = {**parameters, **SCALINGS[scaling], "rope_type": scaling}
    if scaling == "longrope":
        size = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        count = int(size * found.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))) // 2
        found |= {"short_factor": [1.0] * count, "long_factor": [2.0 + place for place in range(count)]}
    return found


def build(name: str, scaling: str = "default", **changes: Any) -> Any:
    """Build the model with weights of a sensible size. ``changes`` are other options of its configuration.

    Its own attention is the eager one: the others leave out caps and sinks of attention scores.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = make_config(name, scaling, **changes)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, FAMILIES[name].spread)
    model.tie_weights()
    return model


def make_network(model: Any, precision: torch.dtype = torch.float32, *, packed: bool | None = None) -> Network:
    """The network of a run whose longest sequence has LONGEST tokens."""
    fix_rotary_length(model, LONGEST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of families that cannot read packed rows
        return Network(model, precision=precision, packed=packed)


PLAIN = Sampling(max_new_tokens=40)
Sequences = list[tuple[list[int], int]]  # the tokens of each rollout, and how many of them are its prompt


def sample(network: Network, sampling: Sampling, *, paged: bool = False) -> tuple[Batch, Sequences]:
    """Rollouts on both sides of the original length, as the embedded engine samples them."""
    if find_cache_obstacle(network) is not None:
        runner: Any = RecomputeRunner(network, max_slots=3, length=LONGEST)
    else:
        runner = (make_paged_runner if paged else make_runner)(network, length=LONGEST)
    short = Sampling(**{**vars(sampling), "max_new_tokens": 5})
    requests = [Request([5, 40, 200][: 1 + seed], sampling, seed=seed) for seed in range(2)]
    requests += [Request([7, 90, 31] * 5, short, seed=9)]
    completions = run_requests(make_engine(runner, stop_ids=(2,)), requests)
    rollouts = [make_rollout(each.prompt, make_turn(found)) for each, found in zip(requests, completions, strict=True)]
    batch = pack_grpo([make_group(rollout, index=place) for place, rollout in enumerate(rollouts)])
    pairs = zip(requests, completions, strict=True)
    return batch, [([*each.prompt, *found.tokens.tolist()], len(each.prompt)) for each, found in pairs]


def logits_alone(model: Any, tokens: Sequence[int], prompt: int) -> Tensor:
    """The logits of plain Transformers before each token after the prompt, [L, V]."""
    row = torch.tensor([[*tokens, *[3] * (LONGEST - len(tokens))]])
    return model(row, use_cache=False).logits[0, prompt - 1 : len(tokens) - 1].float()  # type: ignore[no-any-return]


def logprobs_alone(model: Any, sequences: Sequences, sampling: Sampling = PLAIN) -> Tensor:
    """Log-probabilities of sampled tokens by plain Transformers and its own logits processors, a sequence at a time, [N]."""
    found = []
    for tokens, prompt in sequences:
        logits = logits_alone(model, tokens, prompt)
        for processor in processors(sampling):
            logits = processor(None, logits)
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(tokens[prompt:])[:, None])[:, 0])
    return torch.cat(found)


def processors(sampling: Sampling) -> list[Any]:
    """Transformers' own, in the order of its generation."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    found: list[Any] = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    found += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    found += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return found + ([MinPLogitsWarper(sampling.min_p)] if sampling.min_p else [])


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@dataclass(frozen=True)
class FamilyDifferences:
    """Largest differences from Transformers alone, relative to its largest number."""

    scores: float  # log-probabilities of a micro-batch that is read at once
    loss: float
    gradient: float
    slots: float  # log-probabilities that the embedded engine sampled with
    pages: float | None  # None: the family has no cache
    bfloat16: float | None  # scores under autocast on both sides; None: routers choose other experts where it rounds


def compare(name: str, scaling: str, sampling: Sampling = PLAIN) -> FamilyDifferences:
    plain, model = build(name, scaling), build(name, scaling)
    network = make_network(model)
    batch, sequences = sample(network, sampling)
    with torch.no_grad():
        wanted = logprobs_alone(plain, sequences, sampling)
        pages = None
        if find_cache_obstacle(network) is None:
            paged, read = sample(network, sampling, paged=True)
            pages = relative(paged.rollout_logprobs, logprobs_alone(plain, read, sampling))
    scores = NetworkScorer(network, sampling, score_tokens=10_000).score(batch).logprobs
    loss, gradient = compare_gradients(plain, model, network, batch, sequences)
    rounded = None if FAMILIES[name].experts else compare_bfloat16(plain, build(name, scaling), batch, sequences)
    slots = relative(batch.rollout_logprobs, wanted)
    return FamilyDifferences(relative(scores, wanted), loss, gradient, slots, pages, rounded)


def compare_gradients(
    plain: nn.Module, model: nn.Module, network: Network, batch: Batch, sequences: Sequences
) -> tuple[float, float]:
    """Of the mean log-likelihood of a batch: its value and its gradient."""
    learner = make_torch_learner(
        network, PLAIN, optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 0.0}, max_grad_norm=None, train_tokens=10_000
    )
    result = learner.forward_backward(batch, lambda outputs, part: (-outputs.logprobs.sum() / part.totals.tokens, {}))
    likelihood = logprobs_alone(plain, sequences)
    (-likelihood.mean()).backward()
    found = -float(result.outputs.logprobs.double().mean())
    wanted = -float(likelihood.detach().double().mean())
    return abs(found - wanted) / wanted, largest_difference(copy_gradients(model), copy_gradients(plain))


def compare_bfloat16(plain: nn.Module, model: nn.Module, batch: Batch, sequences: Sequences) -> float:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = logprobs_alone(plain, sequences)
    network = make_network(model, torch.bfloat16)
    return relative(NetworkScorer(network, PLAIN, score_tokens=10_000).score(batch).logprobs, wanted)

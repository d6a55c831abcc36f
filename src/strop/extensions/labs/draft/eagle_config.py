"""The shape of an EAGLE-3 head, as its ``config.json`` says it.

vLLM reads ``eagle_aux_hidden_state_layer_ids`` at the top level as the layer *before* which a hidden state is taken, SGLang and ModelOpt
those in ``eagle_config`` as the layer whose *output* it is: both are written, each as its reader takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """Sizes and options of a head. It has the hidden size of its policy, whose token embeddings it reads."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int  # of the policy
    draft_vocabulary: int  # tokens that the head can propose
    aux_layers: tuple[int, ...]  # layers of the policy whose outputs it reads, from 0
    eps: float = 1e-6
    rotary: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    positions: int = 4096  # max_position_embeddings
    norm_before_residual: bool = False
    init_std: float = 0.02

    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` that vLLM and SGLang load."""
        rotary = {key: value for key, value in self.rotary.items() if key != "rope_theta"}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "draft_vocab_size": self.draft_vocabulary,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rotary.get("rope_theta", 10000.0),
            "rope_scaling": None if rotary.get("rope_type", "default") == "default" else rotary,
            "max_position_embeddings": self.positions,
            "initializer_range": self.init_std,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": [index + 1 for index in self.aux_layers],
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self.aux_layers)},
            "torch_dtype": "float32",
        }


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the layers of a policy that a head reads by default: near its begin, in its middle, near its end (as in NeMo-RL and vLLM)."""
    return tuple(sorted({min(1, layers - 1), max(0, layers // 2 - 1), max(min(1, layers - 1), layers - 4)}))


def new_shape(config: Any, *, layers: int | None = None, aux_layers: tuple[int, ...] | None = None) -> EagleShape:
    """Return the shape of a new head for a policy with a Hugging Face ``config``."""
    config = config.get_text_config()
    heads = int(config.num_attention_heads)
    rotary = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rotary:  # one set for each kind of layers, as Gemma 3
        rotary = next((value for value in rotary.values() if isinstance(value, Mapping)), {})
    return EagleShape(
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        layers=layers or 1,
        vocabulary=int(config.vocab_size),
        draft_vocabulary=int(config.vocab_size),
        aux_layers=aux_layers or default_aux_layers(int(config.num_hidden_layers)),
        eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rotary={"rope_type": "default", "rope_theta": 10000.0} | dict(rotary),
        positions=int(getattr(config, "max_position_embeddings", 4096)),
        init_std=float(getattr(config, "initializer_range", 0.02)),
    )


def read_shape(config: Mapping[str, Any], policy_layers: int) -> EagleShape:
    """Return the shape that a head's ``config.json`` says. Raises ValueError for a head of another kind."""
    names = [str(name) for name in config.get("architectures") or []]
    if not any("Eagle3" in name for name in names):
        raise ValueError(f"its config.json names {', '.join(names) or 'no architecture'}, and a head is a {ARCHITECTURE}")
    nested = config.get("eagle_config") or {}
    odd = [
        name for name in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias") if config.get(name) or nested.get(name)
    ]
    if odd:
        raise ValueError(f"its config.json has {', '.join(odd)}, which heads have not in this version")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError("it reads the last hidden state alone (use_aux_hidden_state is false), which is EAGLE-1, not EAGLE-3")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    if int(config.get("target_hidden_size") or hidden) != hidden:
        raise ValueError("its hidden size is not that of its policy, whose embeddings it would read")
    return EagleShape(
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        layers=int(config.get("num_hidden_layers", 1)),
        vocabulary=int(config["vocab_size"]),
        draft_vocabulary=int(config.get("draft_vocab_size") or config["vocab_size"]),
        aux_layers=_read_aux_layers(config, nested, policy_layers),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rotary=_read_rotary(config),
        positions=int(config.get("max_position_embeddings", 4096)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        init_std=float(config.get("initializer_range", 0.02)),
    )


def _read_aux_layers(config: Mapping[str, Any], nested: Mapping[str, Any], policy_layers: int) -> tuple[int, ...]:
    if top := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(index) - 1 for index in top)
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(index) for index in ids) if ids else default_aux_layers(policy_layers)


def _read_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("rope_theta", float(config.get("rope_theta", 10000.0)))
    return found

"""Decoding with the compiled kernels: all layers of a Llama-like model in one call.

The modules still define the model: the kernels take their options from them (for attention, from a recorded pass), and before
the first use one step is compared with the modules. In bfloat16 the kernels round where the modules round under autocast, so
that the sampler's log-probabilities match the learner's. Unsupported models are decoded by their modules, and the reason is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strop.generation.torch.decode_kernels import (
    DTYPES,
    DecodeKernels,
    KernelsUnavailable,
    LayerStruct,
    MatrixStruct,
    ModelStruct,
    PackedMatrix,
    load_kernels,
    matrix_struct,
)
from strop.generation.torch.fast_linears import FastLinears
from strop.generation.torch.kv_cache import SlotCache
from strop.generation.torch.paged.paged_cache import PagedCache
from strop.models.adapters import lora_layers
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.layers.fused_layers import find_unknown_part
from strop.models.layers.known_code import find_form, rms_norm_spec
from strop.models.layers.rounded_layers import find_rounded
from strop.models.network import Network
from strop.models.quantization.float8_training import is_float8

log = logging.getLogger(__name__)


# Decoders that do nothing beyond their layers, norm and rotary embedding.
DECODERS = ("llama.LlamaModel", "qwen2.Qwen2Model", "mistral.MistralModel", "gemma.GemmaModel", "gemma2.Gemma2Model")
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")  # types whose frequencies do not depend on the sequence length


def choose_kernels(network: Network, wanted: bool | None, *, prepack: bool | None) -> DecodeKernels | None:
    """Return the kernels for a network's layers, or None, with the reason in the log.

    ``wanted`` None: use them if possible. True: raises ValueError with the reason if they cannot be used.
    """
    if wanted is False or (wanted is None and (network.device.type != "cpu" or prepack is False or network.exact is not None)):
        return None
    try:
        reason = "prepack_weights is false" if prepack is False else find_obstacle(network)
        if reason is None:
            return load_kernels()
    except KernelsUnavailable as error:
        reason = str(error)
    if wanted:
        raise ValueError(
            f"policy.generation.torch_cfg.compiled_kernels is true, but the kernels cannot be used: {reason}. Set it to null to "
            "decode with the model's own modules instead"
        )
    log.warning("decoding with the model's own modules, which is slower than with compiled kernels: %s", reason)
    return None


def find_obstacle(network: Network) -> str | None:
    """Return why the kernels cannot compute a network's layers; None if they can."""
    if network.exact is not None:
        return "policy.exact_on_policy computes every row exactly like the learner"
    decoder, model = network.decoder, network.model
    kind = type(decoder).__name__
    if network.device.type != "cpu":
        return f"the model is on {network.device}, and they are for CPUs"
    if (part := _find_unknown_part(decoder)) is not None:
        return f"they do not know the layers of {kind}: {part} has its own code"
    if network.routed is not None:
        return "router replay records the experts of each layer"
    if network.precision not in DTYPES:
        return f"they compute in float32 and bfloat16, not in {network.precision}"
    if other := {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float32"}:
        return f"weights are in {', '.join(sorted(other))}, but they round as for float32 weights"
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return "the weights are sharded"
    read = model if network.vision is None else decoder  # the kernels do not use the vision tower
    if any(module._forward_hooks or module._forward_pre_hooks for module in read.modules()):
        return "modules have hooks, which the kernels would not call"
    if any(is_float8(module) for module in model.modules()):
        return "policy.fp8 multiplies in FP8"
    if (rounded := find_rounded(model, inputs=True)) is not None:
        return f"{rounded.rounded_by} rounds the inputs of layers"
    if network.precision == torch.bfloat16 and any(True for _ in lora_layers(model)):
        return "adapters stay separate in bfloat16"
    return _find_odd_option(decoder.config)


def _find_odd_option(config: Any) -> str | None:
    activation = _activation(config)
    if activation not in ACTIVATIONS:
        return f"they do not know the activation {activation}"
    rotary = config.rope_parameters.get("rope_type", "default")
    if rotary not in FIXED_ROTARY:
        return f"rotary embeddings of type {rotary} change with the sequence length"
    if odd := [size for size in (config.hidden_size, config.intermediate_size) if size % 2]:
        return f"a size of {odd[0]} is odd"
    return None


def _find_unknown_part(decoder: Any) -> str | None:
    if find_form(type(decoder), DECODERS) is None:
        return type(decoder).__name__
    return next(filter(None, map(find_unknown_part, decoder.layers)), None)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


class FastLayers:
    """The layers and the output layer of a network as one function of the kernels."""

    def __init__(
        self, network: Network, linears: FastLinears, kernels: DecodeKernels, specs: Sequence[AttentionSpec], length: int
    ) -> None:
        """``specs``: the attention options of each layer; ``length``: the longest sequence."""
        self.network = network
        self.kernels = kernels
        self.specs = specs
        self.length = length
        self._linears = linears
        spec = rms_norm_spec(network.decoder.norm)  # type: ignore[arg-type]
        assert spec is not None
        self._norm_spec = spec
        self._norms: dict[str, Tensor] = {}  # [hidden] or [D] in float32, by module name
        self._biases: list[Tensor] = []  # referenced by the structures
        self._model: ModelStruct | None = None
        self._cache: SlotCache | PagedCache | None = None  # referenced by the structures
        self._rotary = self._compute_rotary()

    @torch.no_grad()
    def _compute_rotary(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [length, D]."""
        decoder: Any = self.network.decoder
        positions = torch.arange(self.length)[None]
        cosines, sines = decoder.rotary_emb(torch.zeros(1, 1, 1), position_ids=positions)
        return cosines[0].float().contiguous(), sines[0].float().contiguous()

    def refresh(self) -> None:
        """Use the weights most recently copied by ``linears``."""
        self._model = None

    @torch.no_grad()
    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        table: Tensor,
        cache: SlotCache | PagedCache,
        captured: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Append a token to each of B sequences: tokens and positions [B] int64, table [B, n] int32 of their pages -> logits [B, V].

        The outputs of the layers ``captured`` [c] int64 are written to ``states`` [B, c, hidden] float32.
        """
        if self._model is None or self._cache is not cache:
            self._model, self._cache = self._describe(cache), cache
        embedded = self.network.model.get_input_embeddings()(tokens).float().contiguous()
        logits = self.kernels.decode(
            self._model,
            embedded=embedded,
            positions=positions.contiguous(),
            table=table.contiguous(),
            page=cache.keys.shape[3],
            rotary=self._rotary,
            dtype=self.network.precision,
            captured=captured,
            states=states,
        )
        return self.network.head.transform_logits(logits)

    def find_stale_norms(self) -> dict[str, Tensor]:
        """Return the norms' weights that differ from the module's, by canonical name."""
        stale: dict[str, Tensor] = {}
        for name, copy in self._norms.items():
            if not torch.equal(copy, self._norm_weight(self.network.decoder.get_submodule(name))):
                stale[f"{self._prefix()}{name}.weight"] = copy - self._norm_spec.offset
        return stale

    def _prefix(self) -> str:
        return next((f"{name}." for name, module in self.network.model.named_modules() if module is self.network.decoder), "")

    def _describe(self, cache: SlotCache | PagedCache) -> ModelStruct:
        decoder: Any = self.network.decoder
        config = decoder.config
        self._biases.clear()
        self._norms.clear()
        layers = [self._describe_layer(index, layer, cache) for index, layer in enumerate(decoder.layers)]
        self._layers = (LayerStruct * len(layers))(*layers)
        spec = cache.shape
        attention = decoder.layers[0].self_attn
        return ModelStruct(
            layers=self._layers,
            head=self._matrix(self.network.model.get_output_embeddings()),
            final_norm=self._norm("norm"),
            count=len(layers),
            hidden=config.hidden_size,
            heads=self._packed(attention.q_proj)[0].outputs // spec.head_size,
            kv_heads=spec.heads,
            head_size=spec.head_size,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            late_rounding=not self._norm_spec.rounds_first,
            activation=ACTIVATIONS[_activation(config)],
        )

    def _describe_layer(self, index: int, layer: Any, cache: SlotCache | PagedCache) -> LayerStruct:
        attention, mlp, spec = layer.self_attn, layer.mlp, self.specs[index]
        modules = {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj, "output": attention.o_proj}
        modules |= {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        norms = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if hasattr(layer, "pre_feedforward_layernorm"):
            norms |= {"attention_out_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
            norms |= {"mlp_out_norm": "post_feedforward_layernorm"}
        if hasattr(attention, "q_norm"):
            norms |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
        return LayerStruct(
            **{name: self._matrix(module) for name, module in modules.items()},
            **{name: self._norm(f"layers.{index}.{path}") for name, path in norms.items()},
            keys=cache.keys[index].data_ptr(),
            values=cache.values[index].data_ptr(),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            window=spec.window or 0,
        )

    def _packed(self, module: nn.Module) -> tuple[PackedMatrix, Tensor | None]:
        return self._linears.packed_weights(module)

    def _matrix(self, module: nn.Module) -> MatrixStruct:
        weight, bias = self._packed(module)
        if bias is not None:
            bias = bias.float()
            self._biases.append(bias)
        return matrix_struct(weight, bias)

    def _norm(self, name: str) -> int:
        """Return the address of a norm's factors, which live as long as the structures."""
        self._norms[name] = self._norm_weight(self.network.decoder.get_submodule(name))
        return self._norms[name].data_ptr()

    def _norm_weight(self, module: Any) -> Tensor:
        weight: Tensor = module.weight.detach()
        return self._norm_spec.offset + weight if self._norm_spec.offset else weight

"""An EAGLE-3 draft head: a decoder layer over fused hidden states of the policy (Li et al. 2025, arXiv 2503.01840).

A row of the head stands for a token whose predecessor the policy has read. It joins the token's embedding with what the policy made of the
predecessor, and predicts what the policy predicts after the token. Hidden states of the policy are of three layers, and ``fuse`` makes one
vector of them; where the policy has not read the predecessor yet, the head's own output stands in its place. The names of the weights are
those of SpecForge's checkpoints, which vLLM and SGLang load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from strop.extensions.labs.draft.eagle_config import EagleShape, read_shape
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.layers.known_code import decoder_layers
from strop.models.load_report import find_not_finite, naming_damaged_weights
from strop.models.loading import ModelNotFound, locate_model
from strop.models.network import Network
from strop.models.network_parts import WEIGHTS, DraftHead


class EagleAttention(nn.Module):
    """Attention of a layer of a head, which follows the plan of the call."""

    def __init__(self, shape: EagleShape, index: int) -> None:
        super().__init__()
        inputs = shape.hidden_size * (2 if index == 0 else 1)
        self.index, self.head_dim = index, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        """[R, inputs] -> [R, H]; ``rotary``: cosines and sines [R, D]."""
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        cosine, sine = (part.unsqueeze(1).to(query.dtype) for part in rotary)
        query, key = (tensor * cosine + rotate_half(tensor) * sine for tensor in (query, key))
        spec = AttentionSpec(self.index, self.head_dim**-0.5)
        output: Tensor = self.o_proj(plan.attend(query, key, value, spec).flatten(1))
        return output


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


class EagleLayer(nn.Module):
    """A layer of a head. The first one reads embeddings in addition to hidden states."""

    def __init__(self, shape: EagleShape, index: int) -> None:
        super().__init__()
        self.first, self.norm_before_residual = index == 0, shape.norm_before_residual
        self.self_attn = EagleAttention(shape, index)
        self.mlp = LlamaMLP(_llama_config(shape))
        self.input_layernorm = LlamaRMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size, shape.eps)
        if self.first:
            self.hidden_norm = LlamaRMSNorm(shape.hidden_size, shape.eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        if self.first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        else:
            residual, inputs = hidden, self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotary, plan)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleHead(DraftHead):
    """The head of a policy: ``fuse`` hidden states, ``forward`` rows, ``norm`` and ``lm_head`` make logits of them."""

    key = "policy.draft"
    d2t: Tensor  # [draft vocabulary] int64: the policy's id of a token minus the head's

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.hidden_size * len(shape.aux_layers), shape.hidden_size, bias=False)
        if shape.layers == 1:
            self.midlayer = EagleLayer(shape, 0)
        else:
            self.layers = nn.ModuleList(EagleLayer(shape, index) for index in range(shape.layers))
        self.norm = LlamaRMSNorm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocabulary, dtype=torch.int64), persistent=False)
        self.rotary_emb = LlamaRotaryEmbedding(_llama_config(shape))

    @property
    def all_layers(self) -> list[EagleLayer]:
        return [self.midlayer] if self.shape.layers == 1 else [layer for layer in self.layers if isinstance(layer, EagleLayer)]

    @property
    def reduced(self) -> bool:
        """Whether it proposes some tokens of the policy's vocabulary only."""
        return self.shape.draft_vocabulary != self.shape.vocabulary

    @property
    def token_ids(self) -> Tensor:
        """The policy's ids of the head's tokens, [draft vocabulary] int64, ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, states: Tensor) -> Tensor:
        """Hidden states of the policy's layers [R, layers * H] -> [R, H]."""
        fused: Tensor = self.fc(states)
        return fused

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Embeddings of tokens [R, H], fused states of their predecessors [R, H], whose positions are ``positions`` [R] -> [R, H]."""
        rotary = self._rotate(hidden, positions)
        for layer in self.all_layers:
            hidden = layer(embedded, hidden, rotary, plan)
        return hidden

    def _rotate(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self.rotary_emb(hidden[None], position_ids=positions[None])
        return cosine[0], sine[0]

    @torch.no_grad()
    def initialize(self, policy_head: Tensor, seed: int) -> None:
        """Set the weights of a new head: random ones, and the policy's output layer [V, H] for its own."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, self.shape.init_std, generator=generator)
                parameter.copy_(drawn)
        self.copy_policy_head(policy_head)

    @torch.no_grad()
    def copy_policy_head(self, policy_head: Tensor) -> None:
        """Take the rows of the policy's output layer [V, H] that are of the head's tokens."""
        self.lm_head.weight.copy_(policy_head.detach()[self.token_ids.to(policy_head.device)])

    def stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what engines load: the weights, and with a reduced vocabulary which of the policy's tokens the head's are (d2t)."""
        for name, parameter in self.named_parameters():
            yield name, parameter.detach()
        if self.reduced:
            yield "d2t", self.d2t

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what engines are sent at a publish, as ``draft.NAME``: all but d2t, which does not change."""
        for name, tensor in self.stored_weights():
            if tensor.is_floating_point():
                yield f"draft.{name}", tensor

    def save(self, folder: Path) -> Path:
        """Write a head that ``load_head``, vLLM and SGLang load."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.stored_weights()}
        if self.reduced:
            known = torch.zeros(self.shape.vocabulary, dtype=torch.bool)
            known[self.token_ids.cpu()] = True
            tensors["t2d"] = known
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.shape.config(), indent=2) + "\n")
        return folder


def _llama_config(shape: EagleShape) -> Any:
    return LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rms_norm_eps=shape.eps,
        rope_parameters=dict(shape.rotary),
        mlp_bias=False,
    )


# Checkpoints of EAGLE-3 heads: ``config.json`` and ``model.safetensors``, as SpecForge writes and vLLM and SGLang load them.

MAPS = ("d2t", "t2d")


def find_head_folder(name: str) -> Path:
    """Return the folder of a head; one of the hub is downloaded to the cache. Raises ModelNotFound."""
    try:
        folder = Path(locate_model(name)[0])
    except ModelNotFound as error:
        raise error.with_key("policy.draft.model_name") from error
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "pytorch_model.bin"]))
    return folder


def load_head(folder: Path, policy_layers: int, policy_head: Tensor) -> EagleHead:
    """Load a head. One without an output layer takes the policy's, [V, H]. Raises ValueError if it is not a head of this policy."""
    try:
        shape = read_shape(json.loads((folder / "config.json").read_text()), policy_layers)
        vocabulary, hidden = policy_head.shape
        if (shape.vocabulary, shape.hidden_size) != (vocabulary, hidden):
            raise ValueError(
                f"it is for a vocabulary of {shape.vocabulary} and hidden states of {shape.hidden_size}, and the policy has "
                f"{vocabulary} and {hidden}"
            )
        if (highest := max(shape.aux_layers)) >= policy_layers:
            raise ValueError(f"it reads the output of layer {highest}, and the policy has {policy_layers} layers")
        head = EagleHead(shape)
        load_head_weights(head, _read_tensors(folder), policy_head)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"{folder} has no EAGLE-3 head for this policy: {error}") from error
    return head


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    with naming_damaged_weights(folder):
        if files:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
        found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        return found


@torch.no_grad()
def load_head_weights(head: EagleHead, tensors: Mapping[str, Tensor], policy_head: Tensor | None = None) -> None:
    """Copy weights into a head. Its embeddings are the policy's, whatever the checkpoint has. Raises ValueError if some are missing."""
    own: dict[str, Any] = dict(head.named_parameters())
    given = {_canonical_name(name, head.shape.layers): tensor for name, tensor in tensors.items()}
    if head.reduced:
        if "d2t" not in given:
            raise ValueError(f"it proposes {head.shape.draft_vocabulary} tokens, and no tensor d2t says which")
        head.d2t.copy_(given["d2t"])
    if "lm_head.weight" not in given and policy_head is not None:
        head.copy_policy_head(policy_head)
        own.pop("lm_head.weight")
    if missing := sorted(own.keys() - given.keys()):
        raise ValueError(f"it has no {', '.join(missing[:3])}")
    if unknown := sorted(given.keys() - own.keys() - {*MAPS, "embed_tokens.weight", "lm_head.weight"}):
        raise ValueError(f"its {', '.join(unknown[:3])} has no place in a head of {head.shape.layers} layers")
    if broken := sorted(find_not_finite((name, given[name]) for name in own)):
        raise ValueError(f"its {', '.join(broken[:3])} has NaN or infinite values")
    for name, parameter in own.items():
        if parameter.shape != given[name].shape:
            raise ValueError(f"its {name} is {tuple(given[name].shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(given[name])


def _canonical_name(name: str, layers: int) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if layers == 1 and name.startswith("layers.0.") else name


# Hidden states of a policy's layers, taken from its own forward passes.


class StateCapture:
    """Takes the outputs of some layers, and of the whole decoder, while it is ``active``. It changes nothing of the pass."""

    def __init__(self, decoder: nn.Module, layers: Sequence[int]) -> None:
        """Raises ValueError if the decoder has fewer layers."""
        self.decoder = decoder
        found = decoder_layers(decoder)
        if max(layers) >= len(found):
            raise ValueError(
                f"policy.draft reads the output of layer {max(layers)}, and the policy has {len(found)}: set "
                "policy.draft.aux_layer_indices to layers that it has"
            )
        self.layers = [found[index] for index in layers]
        self._states: dict[int, Tensor] = {}
        self.last: Tensor | None = None  # [T, H], of the whole decoder

    @contextmanager
    def active(self) -> Iterator[None]:
        self._states.clear()
        self.last = None
        handles = [layer.register_forward_hook(self._keep(index)) for index, layer in enumerate(self.layers)]
        handles.append(self.decoder.register_forward_hook(self._keep_last))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, index: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._states[index] = hidden.detach().flatten(0, 1)  # [1, T, H] or [T, 1, H]

        return keep

    def _keep_last(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.last = getattr(output, "last_hidden_state", output).detach().flatten(0, 1)

    def take(self) -> Tensor:
        """Return the layers' outputs side by side, [T, layers * H], and forget them."""
        states = torch.cat([self._states[index] for index in range(len(self.layers))], dim=-1)
        self._states.clear()
        return states


class EagleFuser:
    """Makes the fused states [n, H] of tokens in the embedded engine, from what some layers of the policy put out."""

    def __init__(self, network: Network) -> None:
        assert isinstance(network.draft, EagleHead)
        self.network, self.head = network, network.draft
        self.capture = StateCapture(network.decoder, self.head.shape.aux_layers)
        self.layers = torch.tensor(self.head.shape.aux_layers)
        self.size = self.head.shape.hidden_size

    def capturing(self) -> AbstractContextManager[None]:
        return self.capture.active()

    def empty(self, tokens: int) -> Tensor:
        """Allocate memory for the outputs of the layers, [tokens, layers, H] float32."""
        return torch.empty(tokens, len(self.layers), self.size)

    def take(self) -> Tensor:
        """Fuse the outputs captured in the last pass."""
        return self.fuse(self.capture.take())

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """[n, layers * H] -> [n, H] float32."""
        with self.network.autocast():
            return self.head.fuse(states).float()

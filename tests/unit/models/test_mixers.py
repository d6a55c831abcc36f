"""Recurrent layers and sparse attention in packed trees: log-probabilities and gradients beside single sequences and Transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.tensor_mixers import find_head_layout
from strop.learner.parallel.tensor_plan import check_tensor_plan
from strop.models.attention.attention_interface import IMPLEMENTATION
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers.mixer_interface import install_mixers, is_mixer
from strop.models.network import Network, set_attention
from support.every_family import build
from support.models import VOCABULARY, copy_gradients
from support.sharded import Float64Torch
from support.sweep import sweep

MIXED = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "nemotron_h", "granite_hybrid", "falcon_h1", "bamba", "mamba2",
    "mamba", "falcon_mamba", "zamba", "zamba2", "jamba", "lfm2", "lfm2_moe",
)  # fmt: skip
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2")  # sparse attention, whose indexers choose 6 tokens
BLOCKS = ("deepseek_v4", "glm5_next", "minimax_m3")  # of tokens, chosen or pooled by an extension
QUICK = ("qwen3_5", "kimi_linear", "nemotron_h", "jamba", "lfm2", "deepseek_v32", "glm_moe_dsa")
FAMILIES = [
    *sweep((*MIXED, *INDEXED), *QUICK),
    pytest.param(BLOCKS[0], marks=pytest.mark.extensions),
    *(pytest.param(name, marks=[pytest.mark.extensions, pytest.mark.exhaustive]) for name in BLOCKS[1:]),
]
# Branches three levels deep, segments of one token and of none, a chain of segments shorter than a convolution, and a second root.
LENGTHS = (5, 3, 1, 0, 4, 1, 2, 70, 2, 3, 1, 1, 9)
PARENTS = (-1, 0, 0, 0, 1, 1, 3, 3, 4, -1, 9, 10, 11)


def starts() -> list[int]:
    return [sum(LENGTHS[:segment]) for segment in range(len(LENGTHS))]


def paths() -> list[Tensor]:
    """The places of the tokens of each sequence, from the root to a leaf."""
    found = []
    for leaf in set(range(len(LENGTHS))) - set(PARENTS):
        path, segment = [], leaf
        while segment != -1:
            path.insert(0, torch.arange(starts()[segment], starts()[segment] + LENGTHS[segment]))
            segment = PARENTS[segment]
        found.append(torch.cat(path))
    return found


def logprobs(model: Any, tokens: Tensor, positions: Tensor, segments: Any) -> Tensor:
    plan = TreePlan(*(torch.tensor(each) for each in segments), torch.device("cpu"))
    output = model.get_decoder()(input_ids=tokens[None], position_ids=positions[None], plan=plan, use_cache=False)
    return model.lm_head(output.last_hidden_state[0]).log_softmax(-1)  # type: ignore[no-any-return]


def packed_tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.zeros_like(tokens)
    for path in paths():
        positions[path] = torch.arange(len(path))
    return tokens, positions


def weigh(scores: Tensor, seed: int) -> Tensor:
    """A loss that every score has a part in."""
    noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scores * noise.to(scores.dtype)).sum()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modeling code computes in float64 where it asks for float32."""
    narrow = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda values: values if values.dtype == torch.float64 else narrow(values))
    yield


def build_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = build(family).double()
    for module in model.modules():
        code = sys.modules[type(module).__module__]
        if code.__name__.startswith("transformers.models."):
            monkeypatch.setattr(code, "torch", Float64Torch())
    model.config.get_text_config()._experts_implementation = "eager"
    set_attention(model, IMPLEMENTATION)
    install_mixers(model)
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_tree_is_its_sequences_read_alone(
    family: str, recompute: bool, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_exact(family, monkeypatch)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    tokens, positions = packed_tokens()
    together = logprobs(model, tokens, positions, (starts(), LENGTHS, PARENTS))
    sum((weigh(together[path], seed) for seed, path in enumerate(paths())), torch.zeros(())).backward()
    shared = copy_gradients(model)
    model.zero_grad()
    for seed, path in enumerate(paths()):
        alone = logprobs(model, tokens[path], torch.arange(len(path)), ([0], [len(path)], [-1]))
        assert float((alone - together[path]).detach().abs().max()) < 1e-11
        weigh(alone, seed).backward()
    for name, gradient in copy_gradients(model).items():
        assert float((gradient - shared[name]).abs().max()) <= 1e-11 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_tree_is_what_transformers_computes(family: str) -> None:
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.5)  # a delta rule amplifies the rounding of larger ones, in Transformers as here
        network = Network(model)
        assert network.packed and network.fallback is None
        tokens, positions = packed_tokens()
        together = logprobs(model, tokens, positions, (starts(), LENGTHS, PARENTS))
        network.use_native_attention()
        for path in paths():
            wanted = model(input_ids=tokens[path][None], use_cache=False).logits[0].log_softmax(-1)
            assert float((together[path] - wanted).abs().max() / wanted.abs().max()) < 1e-6


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2"])
def test_a_plan_that_divides_a_mixer_is_refused_at_each_of_its_layers(family: str) -> None:
    model = Network(build(family), packed=True).model
    mixer = next(name for name, module in model.named_modules() if is_mixer(module))
    layers = [name for name, module in model.get_submodule(mixer).named_children() if type(module) is nn.Linear]
    for name in layers:
        with pytest.raises(ValueError, match=f"{mixer}.{name} .* whose heads are divided without a plan; name one without it"):
            check_tensor_plan(model, ParallelDims(tensor=2), {f"{mixer.partition('.')[2]}.{name}": "colwise"})


def test_heads_that_ranks_cannot_share_are_refused_with_the_sizes_that_they_can() -> None:
    wide = {"num_attention_heads": 8, "num_key_value_heads": 8}
    cases: list[tuple[str, dict[str, Any], int, str, str]] = [
        ("olmo_hybrid", {"linear_num_value_heads": 2}, 4, "2 value heads", "1, 2"),
        ("mamba2", {}, 3, "8 heads", "1, 2, 4, 8"),
        ("lfm2", {}, 3, "32 channels", "1, 2, 4"),
        ("qwen3_next", {"linear_num_key_heads": 4, "num_experts": 8, **wide}, 8, "4 key heads", "1, 2, 4$"),
    ]
    for family, changes, ranks, heads, sizes in cases:
        wanted = f"tensor_parallel_size {ranks} does not divide the {heads} of the recurrent layer .*; set it to one of {sizes}"
        with pytest.raises(ValueError, match=wanted):
            check_tensor_plan(build(family, **changes), ParallelDims(tensor=ranks))
    shared = build("qwen3_5", linear_num_key_heads=2, linear_num_value_heads=8, **wide)
    check_tensor_plan(shared, ParallelDims(tensor=8))  # four ranks read each key head


def test_a_mixer_with_weights_that_nobody_knows_is_computed_whole_and_refused_where_tokens_are_divided() -> None:
    model = build("nemotron_h")
    assert find_head_layout(model.model.layers[0].mixer) is not None
    for layer in model.model.layers:
        if is_mixer(layer.mixer):
            layer.mixer.gain = nn.Parameter(torch.ones(64))
    assert find_head_layout(model.model.layers[0].mixer) is None
    check_tensor_plan(model, ParallelDims(tensor=2))
    with pytest.raises(ValueError, match=r"layers.0.mixer is a recurrent layer .* set sequence_parallel=false"):
        check_tensor_plan(model, ParallelDims(tensor=2, sequence=True))


def refusal(model: Any) -> str:
    with pytest.warns(UserWarning, match="cannot read packed rows"):
        network = Network(model)
    assert not network.packed and network.fallback is not None
    return network.fallback


class Neighbours(nn.Module):
    """A mixer that nobody knows, whose contribution is zero at first."""

    def __init__(self, size: int, *, layer: int | None) -> None:
        super().__init__()
        self.out = nn.Linear(size, size, bias=False)
        nn.init.zeros_(self.out.weight)
        if layer is not None:
            self.layer_idx = layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out(hidden_states.cumsum(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", [0, None])
def test_a_mixer_that_nobody_knows_is_refused_by_name_before_it_has_learned_anything(layer: int | None) -> None:
    model = build("llama")
    model.model.layers[1].mlp = Neighbours(32, layer=layer)
    assert refusal(model).startswith("layers.1.mlp, a Neighbours, mixes ")


@pytest.mark.parametrize("kind", [nn.GRU, nn.Conv1d])
def test_torch_s_own_mixers_are_refused_wherever_they_hide(kind: type[nn.Module]) -> None:
    model = build("llama")
    model.model.layers[0].mlp.act_fn.hidden = kind(4, 4, kernel_size=2) if kind is nn.Conv1d else kind(4, 4)
    assert refusal(model) == f"layers.0.mlp.act_fn.hidden, a {kind.__name__}, mixes positions in a way that Strop does not know"


def test_short_convolutions_near_zero_are_read_packed_by_the_plan_and_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2 at its default initialisation: what leaked could not be seen in its log-probabilities."""
    from transformers import AutoModelForCausalLM

    from strop.models.mixers import mixer_interface

    model = AutoModelForCausalLM.from_config(build("lfm2").config).eval()
    assert Network(model).packed
    monkeypatch.setattr(mixer_interface, "FUNCTIONS", {})
    assert refusal(AutoModelForCausalLM.from_config(model.config).eval()).startswith(
        "layers.0.conv, a Lfm2ShortConv, mixes positions"
    )


def test_families_without_a_plan_are_refused_by_the_name_of_the_module() -> None:
    for family, name in {
        "recurrent_gemma": "layers.0.temporal_block.conv_1d, a Conv1d",
        "minimax": "layers.0.self_attn, a MiniMaxLightningAttention",
        "bloom": "h.0.self_attention, a BloomAttention",
    }.items():
        assert refusal(build(family)).startswith(f"{name}, mixes positions")


def test_a_call_without_a_plan_is_transformers_own_after_one_with_a_plan_failed() -> None:
    model = build("qwen3_5")
    set_attention(model, "eager")
    tokens = torch.arange(3, 23)[None]
    wanted = model(input_ids=tokens, use_cache=False).logits
    install_mixers(model)
    with pytest.raises(AttributeError):
        model(input_ids=tokens, use_cache=False, plan=object())
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, wanted)

"""An EAGLE-3 head: its files, its loss, and its rows read together or one sequence at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.algorithms.base import TokenOutputs
from strop.extensions.labs.draft.draft_trainer import DraftPass, fit_draft
from strop.extensions.labs.draft.eagle_config import default_aux_layers, new_shape, read_shape
from strop.extensions.labs.draft.eagle_head import EagleHead, StateCapture, load_head
from strop.models.network import Network
from strop.models.network_parts import WEIGHTS
from strop.sampling import Sampling
from support.drafts import add_head
from support.models import build, to_float64
from support.rollouts import pack_grpo, simple_groups

SHAPES = ((5, (3, 6, 1)), (1, (4, 2)), (9, (1, 1)))


@pytest.fixture(scope="module")
def network() -> Network:
    network = Network(to_float64(build("llama", layers=3)))
    add_head(network, sharpness=5.0)
    return network


def test_the_layers_read_by_default_are_those_of_nemo_rl() -> None:
    assert default_aux_layers(28) == (1, 13, 24)
    assert default_aux_layers(2) == (0, 1)
    assert default_aux_layers(1) == (0,)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_is_saved_and_loaded_to_the_bit(tmp_path: Path, layers: int) -> None:
    network = Network(build("qwen3"))
    head = add_head(network, layers=layers, seed=3)
    head.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    names = set(load_file(tmp_path / "model.safetensors"))
    expected = {"fc.weight", "norm.weight", "lm_head.weight"}
    expected |= {
        f"{'midlayer' if layers == 1 else 'layers.0'}.{name}" for name in ("hidden_norm.weight", "self_attn.q_proj.weight")
    }
    assert expected <= names
    again = load_head(tmp_path, 2, network.head.weight)
    assert again.shape == head.shape
    for (name, left), (other, right) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(left, right)


def test_a_head_of_fewer_tokens_says_which_and_takes_their_rows_of_the_output_layer(tmp_path: Path) -> None:
    network = Network(build("llama"))
    add_head(network).save(tmp_path)
    kept = torch.arange(0, 307, 3)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["embed_tokens.weight"] = torch.zeros(307, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(kept)}))
    head = load_head(tmp_path, 2, network.head.weight)
    assert head.reduced and torch.equal(head.token_ids, kept)
    assert torch.equal(head.lm_head.weight, network.head.weight[kept])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLMEagle3"),
        ({"vocab_size": 400}, "vocabulary of 400"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, "layer 8, and the policy has 2 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"draft_vocab_size": 100}, "no tensor d2t"),
    ],
    ids=["architecture", "vocabulary", "option", "layer", "eagle_1", "no_map"],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, change: dict[str, object], message: str) -> None:
    network = Network(build("llama"))
    add_head(network).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, 2, network.head.weight)


def test_the_rotary_scaling_of_a_policy_is_written_and_read() -> None:
    network = Network(build("llama"))
    config = network.model.config
    shape = new_shape(config)
    assert read_shape(shape.config(), 2) == shape
    assert shape.rotary["rope_theta"] == config.rope_parameters["rope_theta"]


def test_the_loss_is_the_cross_entropy_to_the_policys_distribution(network: Network) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, policy = (torch.randn(23, 32, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    weight = torch.randn(307, 32, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.rand(23, dtype=torch.float64, generator=generator)
    for ids in (None, torch.arange(1, 307, 2)):
        known = weight.detach()[: 307 if ids is None else len(ids)].requires_grad_()
        fit = fit_draft(hidden.detach(), known.detach(), policy.detach(), network.head, rows, 0.7, ids, chunk=5)
        target = (network.head.compute_logits(policy.detach()) / 0.7)[:, slice(None) if ids is None else ids].softmax(-1)
        logs = (hidden @ known.t() / 0.7).log_softmax(-1)
        loss = -(target * logs).sum(-1)
        grads = torch.autograd.grad((loss * rows).sum(), [hidden, known])
        assert (
            torch.allclose(fit.loss, loss)
            and torch.allclose(fit.grad_hidden, grads[0])
            and torch.allclose(fit.grad_weight, grads[1])
        )
        whole = (network.head.compute_logits(policy.detach()) / 0.7).softmax(-1)
        q = torch.zeros_like(whole)
        q[:, slice(None) if ids is None else ids] = logs.exp().detach()
        assert torch.allclose(fit.overlap, torch.minimum(whole, q).sum(-1))


def test_layers_that_the_policy_has_not_are_refused_with_how_many_it_has(network: Network) -> None:
    with pytest.raises(ValueError, match="the output of layer 3, and the policy has 3"):
        StateCapture(network.decoder, (1, 3))


def run_pass(network: Network, share: bool, parts: int | None = None) -> dict[str, torch.Tensor]:
    """Return the gradients of a head's pass over whole rows, shared prompts or not."""
    head = network.draft
    assert head is not None
    batch = pack_grpo(simple_groups(*SHAPES), share_prefixes=share)
    capture = StateCapture(network.decoder, head.shape.aux_layers)
    head.zero_grad(set_to_none=True)
    with capture.active(), torch.no_grad():
        outputs = network.outputs(batch, Sampling())
    assert isinstance(outputs, TokenOutputs) and capture.last is not None
    DraftPass(network, head, Sampling()).accumulate(batch, capture.take(), capture.last)
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}


def test_shared_prompts_give_the_gradient_of_separate_rows(network: Network) -> None:
    shared, apart = run_pass(network, True), run_pass(network, False)
    assert shared.keys() == apart.keys() == dict(network.draft.named_parameters()).keys()  # type: ignore[union-attr]
    for name, gradient in shared.items():
        assert (gradient - apart[name]).abs().max() < 1e-12 * (1 + gradient.abs().max()), name
        assert gradient.abs().max() > 0, name


def test_a_head_that_copies_its_policy_is_always_accepted() -> None:
    """The head's last state set to the policy's: overlap 1, and a gradient of zero."""
    generator = torch.Generator().manual_seed(1)
    network = Network(build("llama"))
    hidden = torch.randn(40, 32, generator=generator)
    head = EagleHead(new_shape(network.model.config))
    head.initialize(network.head.weight, 0)
    fit = fit_draft(hidden, head.lm_head.weight.detach(), hidden, network.head, torch.ones(40), 1.0, None, 16)
    assert torch.allclose(fit.overlap, torch.ones(40), atol=1e-5) and bool((fit.same_top == 1).all())
    assert fit.grad_hidden.abs().max() < 1e-6


def test_a_head_with_nan_is_refused(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    head = EagleHead(new_shape(model.config, layers=1, aux_layers=None))
    head.initialize(model.lm_head.weight, 0)
    torch.nn.init.constant_(next(head.parameters()), float("nan"))
    with pytest.raises(ValueError, match="has NaN or infinite values"):
        load_head(head.save(tmp_path), 4, model.lm_head.weight)


def test_a_head_whose_weights_are_a_pointer_of_git_is_refused(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    folder = EagleHead(new_shape(model.config, layers=1, aux_layers=None)).save(tmp_path)
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 99\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        load_head(folder, 4, model.lm_head.weight)

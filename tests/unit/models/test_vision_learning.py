"""A learner reads images: the gradient is that of Transformers' own forward pass, however a batch is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.data.packing import pack
from strop.data.splitting import split_micro_batches
from strop.models.network import Network
from strop.models.vision.vision_tower import freeze_audio, freeze_tower, row_positions
from strop.sampling import Sampling
from strop.types import Batch, Branch, Group, Turn, observation_turn
from support.learners import make_torch_learner
from support.models import copy_gradients, largest_difference
from support.vision_models import FAMILIES, build_vision_model, draw_image, keep_rotary_float64, make_vision_config
from support.vision_rollouts import encode_images, make_image_groups, make_vision_network, make_vision_processor, policy_turn

ALL = tuple(FAMILIES)


def bound(family: str) -> float:
    """The largest difference in float64, relative for gradients. Routers, the position embeddings of GLM's tower, the averages of
    Gemma 4's and Transformers' gated delta rule compute in float32.
    """
    return 1e-5 if family == "qwen3_5" else 1e-6 if "moe" in family or family.startswith(("glm", "gemma4")) else 1e-9


def keep(*kept: str) -> list[Any]:
    """All families, of which those that are not named are left to the exhaustive tests."""
    return [pytest.param(family, marks=() if family in kept else pytest.mark.exhaustive) for family in ALL]


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rotary_float64(monkeypatch)


def predicted_logprobs(network: Network, batch: Batch) -> Tensor:
    return network.outputs(batch, Sampling()).logprobs


def weights_of(count: int) -> Tensor:
    """A loss that sees each token alone."""
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64)


def reference(family: str, model: Any, groups: Sequence[Group]) -> Tensor:
    """Log-probabilities of the sampled tokens by Transformers' own forward pass, one rollout after another."""
    processor = make_vision_processor(family)
    model.set_attn_implementation("sdpa")  # eager attention takes its softmax in float32
    found = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        tokens = rollout.tokens()
        arguments: dict[str, Any] = {}
        is_image = torch.zeros(len(tokens), dtype=torch.int64)
        for image in rollout.path_images:
            is_image[image.start : image.end] = (tokens[image.start : image.end] == processor.image_token_id).long()
        read = tokens.clone()
        read[(tokens == processor.image_token_id) & (is_image == 0)] = 65  # Transformers takes any image token for an image
        if rollout.path_images:
            pixels = [processor.pixels(image) for image in rollout.path_images]
            arguments = {name: torch.cat([each[name] for each in pixels]) for name in processor.family.tower_inputs}
            arguments = processor.family.arrange(arguments)
            if not family.startswith("gemma4"):  # which scales pixels in their own dtype
                arguments["pixel_values"] = arguments["pixel_values"].double()
            if family.startswith(("qwen", "glm")):
                arguments["mm_token_type_ids"] = is_image[None]
            if family.startswith("gemma"):
                arguments[processor.family.token_types] = is_image[None]
        logits = model(input_ids=read[None], attention_mask=torch.ones_like(read)[None], use_cache=False, **arguments).logits[0]
        position = len(rollout.prompt)
        for turn in rollout.turns:
            if turn.sampled:
                rows = logits[position - 1 : position - 1 + len(turn.tokens)].log_softmax(-1)
                found.append(rows.gather(1, turn.tokens[:, None])[:, 0])
            position += len(turn.tokens)
    return torch.cat(found)


def without_image_tokens(family: str, groups: Sequence[Group]) -> list[Group]:
    """The groups with another token in the place of sampled image tokens."""
    token = make_vision_processor(family).image_token_id

    def clean(turn: Turn) -> Turn:
        return replace(turn, tokens=turn.tokens.masked_fill(turn.tokens == token, 65)) if turn.sampled else turn

    return [
        replace(group, rollouts=tuple(replace(each, turns=tuple(map(clean, each.turns))) for each in group.rollouts))
        for group in groups
    ]


def gradients_of(network: Network, batches: Sequence[tuple[Batch, Tensor]], weights: Tensor) -> dict[str, Tensor]:
    network.model.zero_grad(set_to_none=True)
    for batch, index in batches:
        (predicted_logprobs(network, batch) * weights[index]).sum().backward()
    return copy_gradients(network.model)


@pytest.mark.parametrize("family", keep("qwen3_vl", "qwen3_5", "glm46v", "gemma3", "gemma4", "smolvlm"))
def test_log_probabilities_and_gradients_are_those_of_transformers(family: str) -> None:
    groups = without_image_tokens(family, make_image_groups(family, 0))
    network = make_vision_network(family)
    batch = pack(groups)
    everything = torch.arange(len(batch.target))
    expected_model = build_vision_model(family, dtype=torch.float64)
    expected = reference(family, expected_model, groups)
    torch.testing.assert_close(predicted_logprobs(network, batch), expected, rtol=0, atol=bound(family))
    (expected * weights_of(len(expected))).sum().backward()
    found = gradients_of(network, [(batch, everything)], weights_of(len(expected)))
    assert largest_difference(found, copy_gradients(expected_model)) < bound(family)
    tower = [name for name in found if "visual" in name or "vision" in name]
    assert sum(float(found[name].abs().max()) > 0 for name in tower) > len(tower) / 2


@pytest.mark.parametrize("family", keep("qwen2_5_vl", "gemma3"))
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(family: str) -> None:
    groups = make_image_groups(family, 1)
    whole, flat = pack(groups), pack(groups, share_prefixes=False)
    everything = torch.arange(len(whole.target))
    weights = weights_of(len(whole.target))
    packed, padded = make_vision_network(family), make_vision_network(family, packed=False)
    expected = gradients_of(packed, [(whole, everything)], weights)
    cuts = {
        "unshared": gradients_of(packed, [(flat, everything)], weights),
        "padded": gradients_of(padded, [(whole, everything)], weights),
    }
    for budget in (40, 90):
        for name, batch in (("shared", whole), ("flat", flat)):
            parts = [(part.batch, part.index) for part in split_micro_batches(batch, budget)]
            cuts[f"{name} in micro-batches of {budget}"] = gradients_of(packed, parts, weights)
    assert {name: largest_difference(found, expected) < bound(family) for name, found in cuts.items()} == dict.fromkeys(
        cuts, True
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ALL)
def test_no_cut_at_all_changes_the_gradient(family: str, seed: int) -> None:
    """Random groups, some with branches, random budgets, in rows of every form."""
    chosen = random.Random(seed)
    groups = [with_branches(family, group, chosen) for group in make_image_groups(family, 10 + seed)]
    batches = {share: pack(groups, share_prefixes=share) for share in (True, False)}
    weights = weights_of(len(batches[True].target))
    networks = {packed: make_vision_network(family, packed=packed, seed=seed) for packed in (True, False)}
    expected = gradients_of(networks[True], [(batches[True], torch.arange(len(weights)))], weights)
    for _ in range(4):
        share, packed, budget = chosen.random() < 0.5, chosen.random() < 0.7, chosen.randrange(30, 200)
        parts = split_micro_batches(batches[share], budget, padded=not packed)
        found = gradients_of(networks[packed], [(part.batch, part.index) for part in parts], weights)
        assert largest_difference(found, expected) < bound(family), (share, packed, budget)


def with_branches(family: str, group: Group, chosen: random.Random) -> Group:
    """The group with a branch of its first rollout that begins at the last token of the prompt and sees an image of its own."""
    first = group.rollouts[0]
    start = len(first.prompt) - 1
    tokens, images = encode_images(family, f"x{make_vision_processor(family).placeholder}y", [draw_image(chosen.randrange(9))])
    observed = observation_turn(tokens, "", [image.moved(start) for image in images])
    branch = Branch(parent=0, start=start, turns=(observed, policy_turn([chosen.randrange(256) for _ in range(3)])))
    return replace(group, rollouts=(replace(first, branches=(branch,)), *group.rollouts[1:]))


def test_the_learner_of_a_run_computes_what_the_network_does() -> None:
    """With the layers of a learner's passes, in float32."""
    network = Network(build_vision_model("llava"), packed=True)
    network.enable_vision(make_vision_processor("llava"))
    batch = pack(make_image_groups("llava", 3))
    learner = make_torch_learner(network, Sampling(), None, train_tokens=60, score_tokens=60)
    scored = learner.score(batch).logprobs
    torch.testing.assert_close(scored, predicted_logprobs(network, batch), rtol=0, atol=2e-5)


def test_a_batch_without_images_trains_the_tower_with_a_gradient_of_zero() -> None:
    network = make_vision_network("qwen3_vl")
    groups = make_image_groups("qwen3_vl", 0)[:1]
    text = [replace(groups[0], rollouts=groups[0].rollouts[:1])]
    batch = pack(text)
    assert not batch.images
    predicted_logprobs(network, batch).sum().backward()
    tower = [parameter.grad for name, parameter in network.model.named_parameters() if "visual" in name]
    assert all(gradient is not None and not gradient.any() for gradient in tower)


def test_a_frozen_tower_has_no_gradient_and_its_projection_has_one() -> None:
    network = make_vision_network("llava")
    assert freeze_tower(network.model) > 0
    predicted_logprobs(network, pack(make_image_groups("llava", 0))).sum().backward()
    found = {name: parameter.grad for name, parameter in network.model.named_parameters()}
    assert all(gradient is None for name, gradient in found.items() if "vision_tower" in name)
    assert all(gradient is not None for name, gradient in found.items() if "multi_modal_projector" in name)


def test_what_reads_audio_is_not_trained() -> None:
    from transformers import AutoModelForImageTextToText, Gemma4AudioConfig

    config = make_vision_config("gemma4")
    config.audio_config = Gemma4AudioConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    freeze_audio(model)
    frozen = {name.split(".")[1] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"audio_tower", "embed_audio"}


def test_another_image_gives_other_log_probabilities() -> None:
    network = make_vision_network("qwen2_5_vl")
    batch = pack(make_image_groups("qwen2_5_vl", 0))
    other = draw_image(77, 60, 44)
    swapped = [replace(image, content=other, digest="other") if image == batch.images[0] else image for image in batch.images]
    same_size = network.vision is not None and len(network.vision.features([swapped[0]])[0].rows) == batch.images[0].length
    assert same_size
    differs = predicted_logprobs(network, batch) - predicted_logprobs(network, replace(batch, images=tuple(swapped)))
    assert float(differs.abs().max()) > 0.1


def test_a_network_without_a_processor_refuses_images() -> None:
    network = Network(build_vision_model("llava"), packed=True)
    with pytest.raises(ValueError, match="reads only text"):
        network.hidden(pack(make_image_groups("llava", 0)))
    network.disable_vision("tensor parallelism")
    with pytest.raises(ValueError, match=r"reads only text \(tensor parallelism\)"):
        network.hidden(pack(make_image_groups("llava", 0)))


def test_positions_in_three_dimensions_are_those_of_the_model() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        processor, network = make_vision_processor(family), make_vision_network(family)
        place = processor.placeholder
        tokens, images = encode_images(family, f"a{place}bc{place}d", [draw_image(1, 90, 44), draw_image(2, 30, 100)])
        assert network.vision is not None
        found = row_positions(len(tokens), images, network.vision.grids(images))
        grids = torch.cat([processor.pixels(image)["image_grid_thw"] for image in images])
        kinds = (torch.tensor(tokens) == processor.image_token_id).int()[None]
        expected, delta = network.model.model.get_rope_index(torch.tensor([tokens]), kinds, image_grid_thw=grids)
        assert torch.equal(found.positions, expected[:, 0])
        assert found.following == (len(tokens) + int(delta),)

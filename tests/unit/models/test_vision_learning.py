"""A learner reads images: the gradient is that of Transformers' own forward pass, however a batch is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.data.packing import pack
from strop.data.splitting import split_micro_batches
from strop.models.network import Network
from strop.models.vision.vision_families import find_family
from strop.models.vision.vision_processor import VisionProcessor
from strop.sampling import Sampling
from strop.types import Batch, Group, PromptImage, Rollout, Task, Turn, observation_turn
from support.models import copy_gradients, largest_difference
from support.vision_models import (
    FAMILIES,
    build_vision_model,
    build_vision_tokenizer,
    draw_image,
    keep_rotary_float64,
    make_vision_config,
)

ALL = tuple(FAMILIES)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rotary_float64(monkeypatch)


@cache
def make_processor(family: str) -> VisionProcessor:
    config, tokenizer = make_vision_config(family), build_vision_tokenizer(family)
    return VisionProcessor(find_family(config), FAMILIES[family].image_processor(), tokenizer)


def make_network(family: str, *, packed: bool | None = True, seed: int = 0) -> Network:
    network = Network(build_vision_model(family, dtype=torch.float64, seed=seed), packed=packed)
    network.enable_vision(make_processor(family))
    return network


def policy_turn(tokens: Sequence[int]) -> Turn:
    length = len(tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(tokens),
        text="",
        logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int32),
    )


def encode(family: str, text: str, files: Sequence[bytes]) -> tuple[list[int], tuple[PromptImage, ...]]:
    encoded = make_processor(family).encode_text(text, files)
    return encoded.tokens, encoded.images


def make_groups(family: str, seed: int) -> list[Group]:
    """Groups with 0 to 2 images in the prompt, some with an image in an observation, and the image token among sampled ones."""
    chosen, place = random.Random(seed), make_processor(family).placeholder
    image_token = make_processor(family).image_token_id
    groups = []
    for index in range(3):
        files = [
            draw_image(chosen.randrange(9), 30 + 30 * chosen.randrange(3), 30 + 14 * chosen.randrange(3))
            for _ in range(index % 3)
        ]
        prompt, images = encode(family, "look " + f"{place} and ".join(["at"] * (len(files) + 1)) + "?", files)
        rollouts = []
        for sample in range(2):
            sampled = [chosen.randrange(256) for _ in range(2 + chosen.randrange(4))]
            turns = [policy_turn([*sampled, image_token])]
            if (index + sample) % 2:
                tokens, seen = encode(family, f"now {place}!", [draw_image(50 + sample)])
                start = len(prompt) + len(sampled) + 1
                turns.append(observation_turn(tokens, "", [image.moved(start) for image in seen]))
                turns.append(policy_turn([chosen.randrange(256) for _ in range(3)]))
            rollouts.append(
                Rollout(
                    task=Task(id=f"t{index}"),
                    sample=sample,
                    seed=0,
                    messages=(),
                    prompt=torch.tensor(prompt),
                    turns=tuple(turns),
                    images=images,
                )
            )
        groups.append(Group(index=index, environment="", version=0, rollouts=tuple(rollouts)))
    return groups


def predicted_logprobs(network: Network, batch: Batch) -> Tensor:
    return network.outputs(batch, Sampling()).logprobs


def weights_of(count: int) -> Tensor:
    """A loss that sees each token alone."""
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64)


def reference(family: str, model: Any, groups: Sequence[Group]) -> Tensor:
    """Log-probabilities of the sampled tokens by Transformers' own forward pass, one rollout after another."""
    processor = make_processor(family)
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
            arguments["pixel_values"] = arguments["pixel_values"].double()
            if family.startswith("qwen"):
                arguments["mm_token_type_ids"] = is_image[None]
            if family == "gemma3":
                arguments["token_type_ids"] = is_image[None]
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
    from dataclasses import replace

    token = make_processor(family).image_token_id

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


@pytest.mark.parametrize("family", ALL)
def test_log_probabilities_and_gradients_are_those_of_transformers(family: str) -> None:
    groups = without_image_tokens(family, make_groups(family, 0))
    network = make_network(family)
    batch = pack(groups)
    everything = torch.arange(len(batch.target))
    expected_model = build_vision_model(family, dtype=torch.float64)
    expected = reference(family, expected_model, groups)
    torch.testing.assert_close(predicted_logprobs(network, batch), expected, rtol=0, atol=1e-9)
    (expected * weights_of(len(expected))).sum().backward()
    found = gradients_of(network, [(batch, everything)], weights_of(len(expected)))
    assert largest_difference(found, copy_gradients(expected_model)) < 1e-9
    tower = [name for name in found if "visual" in name or "vision" in name]
    assert sum(float(found[name].abs().max()) > 0 for name in tower) > len(tower) / 2


@pytest.mark.parametrize("family", ALL)
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(family: str) -> None:
    groups = make_groups(family, 1)
    whole, flat = pack(groups), pack(groups, share_prefixes=False)
    everything = torch.arange(len(whole.target))
    weights = weights_of(len(whole.target))
    packed, padded = make_network(family), make_network(family, packed=False)
    expected = gradients_of(packed, [(whole, everything)], weights)
    cuts = {
        "unshared": gradients_of(packed, [(flat, everything)], weights),
        "padded": gradients_of(padded, [(whole, everything)], weights),
    }
    for budget in (40, 90):
        for name, batch in (("shared", whole), ("flat", flat)):
            parts = [(part.batch, part.index) for part in split_micro_batches(batch, budget)]
            cuts[f"{name} in micro-batches of {budget}"] = gradients_of(packed, parts, weights)
    assert {name: largest_difference(found, expected) < 1e-9 for name, found in cuts.items()} == dict.fromkeys(cuts, True)

"""Rollouts with branches: a tree of turns gives what its paths give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Group
from support.models import build, copy_gradients, largest_difference, to_float64
from support.packed import path_rows
from support.rollouts import make_agent_groups, pack_grpo


def log_probabilities_path_by_path(model: torch.nn.Module, groups: list[Group]) -> Tensor:
    found = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for context, tokens, turns in path_rows(rollout):
            logs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
            sampled = [place for turn in turns for place in [turn.sampled] * len(turn.tokens)]
            places = [context + offset for offset, own in enumerate(sampled) if own]
            found += [logs[place - 1, tokens[place]] for place in places]
    return torch.stack(found)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_tree_gives_the_log_probabilities_and_gradients_of_its_paths(family: str, packed: bool, share: bool) -> None:
    """Mistral's window of 7 is shorter than the paths, and counts along each of them."""
    model = to_float64(build(family))
    weights = torch.linspace(-1, 1, len(pack_grpo(make_agent_groups()).target), dtype=torch.float64)
    model.set_attn_implementation("sdpa")  # eager attention takes its softmax in float32
    wanted = log_probabilities_path_by_path(model, make_agent_groups())
    (wanted * weights).sum().backward()
    gradients = copy_gradients(model)
    model.zero_grad()
    network = Network(model, precision=torch.float64, packed=packed)
    found = network.outputs(pack_grpo(make_agent_groups(), share_prefixes=share), Sampling()).logprobs
    (found * weights).sum().backward()
    assert float((found - wanted).abs().max()) < 1e-10
    assert largest_difference(copy_gradients(model), gradients) < 1e-10


def test_what_the_branches_share_is_read_once() -> None:
    shared, flat = pack_grpo(make_agent_groups()), pack_grpo(make_agent_groups(), share_prefixes=False)
    # The prompt; the main path whole, as a branch goes on after it; then each branch without its last token, the fourth but for it.
    tree = 6 + 9 + 1 + (3 + 1) + 4 + 2 + (1 + 1) + (2 + 1)
    assert len(shared.tokens) == tree + 8 + 1
    assert len(flat.tokens) == (14 + 7 + 6 + 11 + 14 + 17 + 3) + 14 + 7
    assert shared.num_sequences == flat.num_sequences == 3
    assert torch.equal(shared.target, flat.target)
    assert shared.totals == flat.totals

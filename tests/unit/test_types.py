"""Rollouts, turns and batches, as everything else reads them."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.functional import aggregate
from strop.types import Ending, Message, assistant, observation_turn, system, user
from support.rollouts import make_group, make_rollout, pack_grpo, sampled_turn, simple_groups


def test_a_conversation_in_tokens_is_prompt_and_turns_in_order() -> None:
    rollout = make_rollout([1, 2], sampled_turn([3, 4]), observation_turn([5], "seen"), sampled_turn([6]))
    assert rollout.tokens().tolist() == [1, 2, 3, 4, 5, 6]
    assert rollout.length == 6
    assert rollout.sampled_tokens == 3
    assert len(rollout.policy_turns) == 2


def test_adding_a_turn_leaves_the_rollout_before_it_alone() -> None:
    before = make_rollout([1], sampled_turn([3]))
    after = before.with_turn(sampled_turn([4]), assistant("four"))
    assert len(before.turns) == 1
    assert after.tokens().tolist() == [1, 3, 4]
    assert after.messages == (Message("assistant", "four"),)


def test_the_text_of_a_rollout_is_the_last_turn_of_the_policy() -> None:
    from dataclasses import replace

    assert make_rollout([1]).text == ""
    first, last = replace(sampled_turn([3]), text="first"), replace(sampled_turn([4]), text="last")
    assert make_rollout([1], first, last, observation_turn([5], "seen")).text == "last"


def test_an_observation_is_never_trained_on() -> None:
    turn = observation_turn([5, 6], "seen")
    assert not turn.sampled
    assert turn.versions.tolist() == [-1, -1]
    assert turn.logprobs.tolist() == [0, 0]


@pytest.mark.parametrize("ending", Ending)
def test_only_running_out_of_room_is_truncation(ending: Ending) -> None:
    assert make_rollout([1], ending=ending).truncated == (ending in (Ending.LENGTH, Ending.CONTEXT))


def test_rewards_of_a_group_are_exact() -> None:
    """0.1 and 0.1 + 1e-9 are different rewards, and stay so."""
    rewards = make_group(make_rollout([1], reward=0.1), make_rollout([1], reward=0.1 + 1e-9)).rewards
    assert rewards.dtype == torch.float64
    assert rewards[0] != rewards[1]


def test_messages_become_what_chat_templates_read() -> None:
    assert [message.as_dict() for message in (system("s"), user("u"), assistant("a"))] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]


def test_counts_of_a_batch_follow_the_mask() -> None:
    from dataclasses import replace

    batch = pack_grpo(simple_groups((3, (2, 5)), (4, (1,))))
    assert batch.sequence_lengths.tolist() == [2, 5, 1]
    assert (batch.num_sequences, batch.num_groups) == (3, 2)
    masked = replace(batch, mask=torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0]))
    assert masked.sequence_lengths.tolist() == [1, 2, 0]


def test_losses_per_sequence_work_where_the_batch_lies() -> None:
    """A device that is not the CPU, without one: fake tensors refuse to mix devices as a GPU does."""
    from dataclasses import replace

    from torch._subclasses.fake_tensor import FakeTensorMode

    whole = pack_grpo(simple_groups((3, (2, 5)), (4, (1,))))
    with FakeTensorMode(allow_non_fake_inputs=True):
        count = len(whole.target)
        columns = {name: torch.empty(count, device="cuda") for name in ("rollout_logprobs", "advantages", "mask")}
        sequence = torch.empty(count, dtype=torch.int64, device="cuda")
        batch = replace(whole, sequence=sequence, **columns)
        values = torch.empty(count, device="cuda")
        for how in ("token_mean", "sequence_mean", "sequence_sum"):
            assert aggregate(values, batch, how).device.type == "cuda"  # type: ignore[arg-type]

"""What unfinished groups have sampled, in a checkpoint and back: to the last bit."""

from __future__ import annotations

import json

import torch

from strop.generation.base import Completion
from strop.rollouts.repeat.clock_state import ClockState
from strop.rollouts.repeat.journal import GroupJournal, JournalEntry

TENSORS = ("tokens", "logprobs", "versions", "entropies", "kept", "routes")


def completion(*, full: bool) -> Completion:
    logprobs = torch.tensor([-0.1, float("-inf"), -1e-30, -17.123456], dtype=torch.float32)
    return Completion(
        tokens=torch.tensor([5, 1 << 40, 0, 3]),
        logprobs=logprobs,
        versions=torch.tensor([2, 2, 3, 3], dtype=torch.int32),
        text='"é\n\ud7ff',
        stopped=full,
        entropies=logprobs.exp() if full else None,
        kept=torch.tensor([[1, -1], [2, 3], [4, -1], [0, 7]], dtype=torch.int32) if full else None,
        routes=torch.arange(24, dtype=torch.uint8).view(6, 2, 2) if full else None,
    )


def test_a_group_comes_back_as_it_was():
    entries = {0: [JournalEntry(3, completion(full=True)), JournalEntry(9, completion(full=False))], 2: []}
    journal = GroupJournal(version=2, begun=1, scoring=11, samples=entries, ended={0, 2})
    again = GroupJournal.from_json(json.loads(json.dumps(journal.to_json())))
    assert (again.version, again.begun, again.scoring, again.ended) == (2, 1, 11, {0, 2})
    assert {sample: [entry.tick for entry in known] for sample, known in again.samples.items()} == {0: [3, 9], 2: []}
    for entry, other in zip(again.samples[0], entries[0], strict=True):
        assert (entry.completion.text, entry.completion.stopped) == (other.completion.text, other.completion.stopped)
        for name in TENSORS:
            own, wanted = getattr(entry.completion, name), getattr(other.completion, name)
            assert (own is None) == (wanted is None), name
            assert own is None or (own.dtype == wanted.dtype and torch.equal(own, wanted)), name


def test_groups_that_other_settings_make_anew_are_forgotten_and_the_tick_is_not(tmp_path):
    journal = GroupJournal(version=2, begun=1)
    (tmp_path / "clock.json").write_text(json.dumps({"tick": 7, "published": 2, "events": 0, "groups": {"4": journal.to_json()}}))
    state = ClockState()
    state.load(tmp_path)
    assert state.versions == {4: 2}
    state.forget_groups()
    assert state.versions == {}


def test_a_checkpoint_of_a_run_without_a_clock_has_no_state(tmp_path):
    state = ClockState()
    state.load(tmp_path / "clock")
    assert state.versions == {}

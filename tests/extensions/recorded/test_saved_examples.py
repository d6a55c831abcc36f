"""Examples in the state of a run: groups that were read and not yet trained on."""

from __future__ import annotations

import io
import pickle

import pytest

from strop.checkpointing import base
from strop.extensions.recorded.examples import Conversation, UnpairedPreference
from strop.types import assistant, user


@pytest.mark.parametrize(
    ("task", "old"),
    [
        (Conversation(id="1", messages=(user("a"), assistant("b"))), "strop.data.examples\nConversation"),
        (Conversation(id="1", messages=(user("a"), assistant("b"))), "strop.data.recorded.examples\nConversation"),
        (
            UnpairedPreference(id="1", prompt=(user("a"),), completion=(assistant("b"),), desirable=True),
            "strop.data.examples\nJudged",
        ),
    ],
    ids=["moved", "moved again", "moved and renamed"],
)
def test_a_state_with_classes_of_an_earlier_version_loads(task, old):
    """Tasks that were buffered when the checkpoint was written are pickled in it by module and name."""
    now = f"{type(task).__module__}\n{type(task).__name__}".encode()
    pickled = pickle.dumps(task, protocol=2)  # as torch.save does; names of classes stand in it as text
    assert pickled.count(now) == 1
    assert base._StateUnpickler(io.BytesIO(pickled.replace(now, old.encode()))).load() == task

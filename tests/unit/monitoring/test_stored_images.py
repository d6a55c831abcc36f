"""Images of stored rollouts: each file once, named in the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop.monitoring.rollout_store.rollout_record import list_images, make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_images import image_name
from strop.types import Group, Image, Message, PromptImage, Rollout, Task, Turn, observation_turn

FILE, OTHER = b"\x89PNG\r\n\x1a\n one", b"\x89PNG\r\n\x1a\n another"


def shown(content: bytes, start: int) -> PromptImage:
    digest = f"{hash(content) & (2**64 - 1):064x}"
    return PromptImage(start=start, length=4, content=content, digest=digest[::-1])


def a_group() -> Group:
    """Two rollouts about one image, the second with another image in an observation."""
    task = Task(id="t", question="How many?", answer="3")
    first = shown(FILE, 2)
    messages = (Message("system", "Look."), Message("user", "How many?", images=(Image("data:image/png;base64," + 90 * "A"),)))
    turn = Turn(
        author="policy", tokens=torch.tensor([5]), text="3", logprobs=torch.zeros(1), versions=torch.ones(1, dtype=torch.int32)
    )
    rollout = Rollout(task=task, sample=0, seed=0, messages=messages, prompt=torch.arange(8), images=(first,))
    plain = rollout.with_turn(turn, Message("assistant", "3"))
    seen = replace(plain, sample=1).with_turn(
        observation_turn([6] * 6, "and this?", (shown(OTHER, 10),)), Message("user", "and this?", images=(Image("b.png"),))
    )
    return Group(index=0, environment="drawn", version=0, rollouts=(plain, seen))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_each_image_is_stored_once_and_the_records_name_it(format: str, tmp_path: Path) -> None:
    group, store = a_group(), RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    for step in (1, 2):
        store.write_images(list_images([group]))
        store.write(step, make_records(step, [group]))
    names = [image_name(image.digest) for image in group.rollouts[1].path_images]
    files = {path.name: path.read_bytes() for path in (tmp_path / "rollouts" / "images").iterdir()}
    assert files == {f"{names[0]}.png": FILE, f"{names[1]}.png": OTHER}
    plain, seen = RolloutStore(tmp_path, format).read(2)  # type: ignore[arg-type]
    assert plain.prompt_images == ((1, names[0]),) and seen.turns[1].images == (names[1],) and not seen.turns[0].images
    assert plain.prompt_messages[1]["content"] == "[image: data:image/png;base64]How many?"
    assert store.steps() == [1, 2]
    store.resume(1)
    assert store.steps() == [1] and len(list(store.images.folder.iterdir())) == 2
    assert store.images.find("../secret") is None


def test_nothing_is_stored_of_images_where_no_rollouts_are(tmp_path: Path) -> None:
    RolloutStore(tmp_path, "none").write_images(list_images([a_group()]))
    assert not list(tmp_path.iterdir())

"""The built-in sets of images, read from rows of the schema that they have on the hub, as NeMo-RL reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.registry import make_environment
from strop.extensions.images.image_sets import IMAGE_SETS
from strop.extensions.recorded.examples import conversations
from strop.types import assistant

MEDIA = str(Path(__file__).parents[2] / "fixtures" / "media")
REGION = "Please provide the bounding box coordinate of the region described by the following phrase: "

pytestmark = pytest.mark.usefixtures("local_hub")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clevr-cogent", [("How many items are there?", "3", 1), ("Is there a red cube?", "yes", 1)]),
        ("geometry3k", [("Find x.", "3", 1), ("Find the area of the figure. Round to the nearest tenth.", "12.5", 1)]),
        ("refcoco", [(f"{REGION}the left one", "[250, 0, 500, 1000]", 1)]),
        ("mmpr-tiny", [("Which angle is it?", "30", 1), ("What is 1 + 1?", "2", 0)]),
    ],
)
def test_questions_answers_and_images_are_those_of_nemo_rl(name: str, expected: list[tuple[str, str, int]]) -> None:
    source = DataSource(dataset_name=name, media_data_dir=MEDIA)
    tasks = make_environment("vlm", {"rewards": [{"name": "format"}]}).tasks(source)
    assert [(task.messages[-1].content, task.answer, len(task.messages[-1].images)) for task in tasks] == expected
    examples = conversations(source)
    assert [(each.messages[0], each.messages[1]) for each in examples] == [
        (task.messages[0], assistant(task.answer)) for task in tasks
    ]
    assert all(image.position == 0 for task in tasks for image in task.messages[0].images)


def test_a_split_may_be_another_set_of_the_hub() -> None:
    questions = {
        split: [row.question for row in DataSource(dataset_name="clevr-cogent", split=split).load_rows()]
        for split in ("valA", "valB")
    }
    assert questions == {"valA": ["How many items are there?"], "valB": ["Is there a red cube?"]}


def test_a_region_is_described_by_the_longest_phrase_for_validation() -> None:
    (row,) = DataSource(dataset_name="refcoco", media_data_dir=MEDIA, purpose="validation").load_rows()
    assert row.prompt == f"{REGION}it is the shape on the left"


def test_images_that_are_not_in_the_data_need_a_folder() -> None:
    with pytest.raises(DataError, match=r"jxu124/refcoco names its images by their paths, and media_data_dir is not set"):
        DataSource(dataset_name="refcoco").load_rows()
    with pytest.raises(DataError, match=r"the image '.*COCO_train2014_000000000001.png' cannot be read .*check media_data_dir"):
        DataSource(dataset_name="refcoco", media_data_dir="/nowhere").load_rows()


def test_every_set_of_images_is_graded_by_an_environment_that_can_be_built() -> None:
    for name in IMAGE_SETS:
        grader = BUILTIN_DATASETS[name].grader
        assert grader is not None
        functions = make_environment(grader.environment, grader.options).reward_functions
        assert sum(each.mark.weight for each in functions.values()) == pytest.approx(1)


def test_images_of_a_set_of_the_hub_that_is_streamed_keep_their_bytes() -> None:
    whole, streamed = (
        DataSource(dataset_name="hiyouga/geometry3k", streaming=streaming).load_rows() for streaming in (False, True)
    )
    assert streamed[0].images == whole[0].images and whole[0].images[0].startswith("data:image/png;base64,")

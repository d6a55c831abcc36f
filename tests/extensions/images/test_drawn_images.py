"""The environment of drawn images: tasks with an image, the same in every run, and an answer that is a number."""

from __future__ import annotations

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import make_environment


def test_a_task_shows_an_image_before_the_question() -> None:
    environment = make_environment("drawn_images", {"image_size": 56, "kinds": ["count"], "max_count": 3})
    tasks = environment.tasks(DataSource(size=8, system_prompt="Look."))
    system, asked = environment.prompt(tasks[3])
    assert system.content == "Look." and asked.content.startswith("How many") and asked.content.endswith("just the number.")
    (image,) = asked.images
    assert image.position == 0 and image.source.startswith("data:image/png;base64,")
    assert len(tasks) == 8 and tasks[3] == environment.tasks(DataSource(size=4, system_prompt="Look."))[3]


def test_validation_has_other_images() -> None:
    environment = make_environment("drawn_images", {"image_size": 56})
    parts = [{task.id for task in environment.tasks(DataSource(size=50, part=part))} for part in ("train", "validation")]
    assert not parts[0] & parts[1]


@pytest.mark.parametrize("options", [{"wording": "How many?"}, {"image_size": 4}, {"kinds": []}])
def test_options_that_cannot_be_are_refused(options: dict) -> None:
    with pytest.raises(EnvironmentConfigError):
        make_environment("drawn_images", options)

"""Section ``data.curriculum``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from strop.data.task_order import OrderedTasks, TaskChooser
from strop.extensions.curriculum.curriculum_keys_config import CurriculumKeys


class CurriculumConfig(CurriculumKeys):
    """The order of the training tasks of each entry; an entry's share of the stream is set by its weight."""

    def make_chooser(
        self, mixture: OrderedTasks, rewards: Mapping[str, Collection[str]], *, slots: int, groups_per_step: int
    ) -> TaskChooser:
        from strop.extensions.curriculum.task_chooser import make_chooser

        return make_chooser(self, mixture, rewards, slots=slots, groups_per_step=groups_per_step)

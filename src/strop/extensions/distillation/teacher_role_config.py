"""Section ``cluster.roles.teacher``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.base_config import changed_keys
from strop.distributed.cluster_config import RoleConfig
from strop.problems import Problem


class TeacherRoleConfig(RoleConfig):
    """The processes of teachers."""

    def warnings_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.config.cluster_checks import count_devices
        from strop.config.schema.run_config import TrainingRunConfig

        if (
            isinstance(config, TrainingRunConfig)
            and count_devices(config).uses_ray
            and all(model.on_ranks for model in config.scoring_models.values())
        ):
            for changed in changed_keys(key, self):
                yield Problem(changed, "it has no effect: no teacher has its own processes (teacher.hosts)")

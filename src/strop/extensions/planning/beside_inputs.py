"""Read the models next to the policy out of a run's configuration: a critic, teachers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.config import TrainingRunConfig
from strop.config.schema.distillation_config import TeacherConfig
from strop.config.schema.run_config import DistillationRunConfig, PpoRunConfig
from strop.extensions.planning.beside_models import BesideModel, without_output
from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, LOGIT_ROWS, LearnerSetup
from strop.extensions.planning.model_size import ModelSize
from strop.extensions.planning.plan_inputs import PlannedDevice
from strop.extensions.planning.planned_learner import read_learner, read_sharding
from strop.extensions.planning.sharding import Sharding
from strop.runs.learner_backend import choose_dims

SELF = "self"  # a teacher that is the policy


def list_beside(config: TrainingRunConfig) -> dict[str, str]:
    """Return the models next to the policy: the name of each model by what it is for."""
    if isinstance(config, PpoRunConfig):
        return {} if config.value.head_only else {"critic": config.value.model_name}
    if isinstance(config, DistillationRunConfig):
        return {key: teacher.model_name for key, teacher in config.all_teachers.items()}
    return {}


def assume_sizes(config: TrainingRunConfig, sizes: Mapping[str, ModelSize]) -> Iterator[str]:
    """Say which models are taken to be as large as the policy, because theirs is unknown."""
    for key, name in list_beside(config).items():
        if name not in (SELF, config.policy.model_name, *sizes):
            yield f"the {key} is as large as the policy: the config.json of {name} is not here"


def read_beside(
    config: TrainingRunConfig, model: ModelSize, sizes: Mapping[str, ModelSize], device: PlannedDevice, world: int | None
) -> Iterator[BesideModel]:
    """Yield models next to a policy of size ``model``; ``sizes``: of models with other names. ``world``: the learner's ranks, if any."""
    if isinstance(config, PpoRunConfig) and not config.value.head_only:
        dims = None if world is None else choose_dims(config.value, world)
        setup = read_learner(config.value, device, dims)
        size = without_output(sizes.get(config.value.model_name, model))
        yield BesideModel(name="critic", model=size, setup=setup, learns=True)
    if isinstance(config, DistillationRunConfig):
        for key, teacher in config.all_teachers.items():
            shared = teacher.model_name == SELF and teacher.self_weights == "current"  # it has no weights of its own
            yield BesideModel(
                name=key,
                model=sizes.get(teacher.model_name, model),
                setup=_read_teacher(config, teacher, device, None if teacher.hosts else world),
                offloaded=teacher.offload or teacher.dtensor_cfg.cpu_offload,
                hosts=teacher.hosts,
                shares_weights=shared,
            )


def _read_teacher(config: TrainingRunConfig, teacher: TeacherConfig, device: PlannedDevice, world: int | None) -> LearnerSetup:
    own = config.policy if teacher.model_name == SELF else teacher
    sharding = Sharding()
    if world is not None:
        sharding = read_sharding(teacher.learner, world)
    tokens = teacher.logprob_mb_tokens or config.policy.score_tokens
    return LearnerSetup(
        tokens=tokens,
        longest=min(tokens, config.policy.max_total_sequence_length),
        on_cpu=device.on_cpu,
        compute_bytes=BFLOAT16 if own.precision == "bfloat16" else FLOAT32,
        weight_bytes=BFLOAT16 if own.weights_dtype == "bfloat16" else FLOAT32,
        trained_share=0.0,
        logit_rows=config.policy.logprob_chunk_size or LOGIT_ROWS,
        sharding=sharding,
    )

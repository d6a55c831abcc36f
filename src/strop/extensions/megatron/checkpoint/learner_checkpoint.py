"""Checkpoints of a whole Megatron Core learner: its network, its optimizer and where its schedule is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from strop.extensions.megatron.adapters.adapter_checkpoint import gather_adapters, load_adapter_folder
from strop.extensions.megatron.checkpoint.megatron_snapshot import (
    MegatronSnapshot,
    load_megatron_checkpoint,
    take_megatron_snapshot,
)
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.extensions.megatron.optimizer.megatron_optimizer import set_schedule_step
from strop.learner.torch.schedule_unit import ScheduleUnit
from strop.models.export import save_model_config


class SavedLearner(Protocol):
    """What is saved of a learner."""

    network: MegatronNetwork
    optimizer: Any
    scheduler: Any
    schedule_unit: ScheduleUnit


def snapshot_learner(learner: SavedLearner, *, optimizer: bool = True, copies: bool = True) -> MegatronSnapshot:
    """Take a snapshot; all ranks must call it. With ``copies``, which are in CPU memory, training may continue immediately."""
    network = learner.network
    network.gather_weights()
    stage, adapters = network.stages[0], network.adapters
    save_config: Callable[[Path], object]
    if adapters is None:
        save_config = partial(save_model_config, network.hf_config, next(stage.parameters()).dtype, scores=stage.head == "scalar")
    else:
        with network.layout.activate():
            save_config = gather_adapters(adapters, copies=copies).write
    schedule = {"steps": int(learner.scheduler.num_steps), "unit": learner.schedule_unit.state_dict()}
    with network.layout.activate():
        return take_megatron_snapshot(
            network.stages,
            learner.optimizer if optimizer else None,
            {"schedule": schedule},
            save_config,
            copies=copies,
            weights=adapters is None,
        )


def load_learner(learner: SavedLearner, folder: Path) -> None:
    """Restore what a learner with any layout saved, in place. The schedule is the configured one, at the step of the saved one.

    Raises FileNotFoundError without an optimizer state, and ValueError if the checkpoint does not fit.
    """
    network = learner.network
    network.gather_weights()
    with network.layout.activate():
        adapters = None if network.adapters is None else partial(load_adapter_folder, network.adapters)
        schedule = load_megatron_checkpoint(network.stages, learner.optimizer, folder, adapters)["schedule"]
        set_schedule_step(learner.scheduler, learner.schedule_unit.convert(schedule["steps"], schedule["unit"]))

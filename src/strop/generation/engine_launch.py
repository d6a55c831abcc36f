"""What one engine in separate processes is launched with, whichever library it is of.

``policy.generation.backend: NAME`` samples with the ``LaunchedEngine`` that an extension declares as ``NAME`` in the group
``strop.engines``, configured by the section ``NAME_cfg`` that it attaches (``engine_config``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from strop.generation.generation_config import GenerationConfig
from strop.generation.pool import ServingEngine
from strop.models.vision.vision_processor import VisionProcessor


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of an engine on one of several nodes."""

    node: str  # Ray's id of the node
    count: int
    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES there; empty on a CPU


@dataclass(frozen=True)
class LaunchedAdapters:
    """What an engine must know of the LoRA adapters that it is sent without the base weights: their shape."""

    rank: int
    layers: tuple[str, ...] = ()  # names of their layers; empty: not known


@dataclass(frozen=True, kw_only=True)
class EngineLaunch(ABC):
    """What one engine is launched with: its configuration, and what is not a key of it."""

    config: GenerationConfig
    model: str  # a folder with config.json and tokenizer files; its weights are used only with ``load_weights``
    on_cpu: bool
    load_weights: bool = False
    tokenizer: str = ""  # a folder or a name; empty: the model's
    adapters: LaunchedAdapters | None = (
        None  # LoRA adapters that are sent without the base weights; None: merged weights are sent
    )
    return_routes: bool = False  # report the experts of each token, for router replay
    reads_images: bool = False  # a vision-language model
    batch_invariant: bool = False  # the bits of a token do not depend on the batch
    draft: str = ""  # folder of the draft head that the learner trains and publishes
    environment: Mapping[str, str] = field(default_factory=dict)  # its CPU threads or GPUs
    output_file: Path | None = None  # file for the output of the engine's processes; None: that of this process
    nodes: tuple[NodeRanks, ...] = ()  # for an engine larger than a node; the first one is where it is launched
    ray_address: str = ""  # of the cluster with these nodes

    @property
    @abstractmethod
    def receivers(self) -> int:
        """The number of processes that receive weights from the learner."""

    def check(self) -> None:  # noqa: B027
        """Raise ValueError for what cannot work, before anything starts."""


class LaunchedEngine(ServingEngine, Protocol):
    """An engine in separate processes, which is made without starting it."""

    launch_class: ClassVar[type[EngineLaunch]]

    def __init__(
        self, name: str, launch: Any, tokenizer: Any, *, stop_ids: Sequence[int], vision: VisionProcessor | None = None
    ) -> None:
        """``launch``: a ``launch_class``. ``vision``: of a model that reads images."""

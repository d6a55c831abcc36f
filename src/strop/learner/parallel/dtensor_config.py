"""Section ``dtensor_cfg``: the torch learner and its parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.base_config import subsection
from strop.learner.learner_config import LearnerSection
from strop.models.lora_config import LoraConfig
from strop.problems import Problem


class DtensorConfig(LearnerSection):
    """The torch learner and its parallelism."""

    backend: ClassVar[str] = "torch"
    title: ClassVar[str] = "the torch learner"
    adapters_key: ClassVar[str] = "lora_cfg"
    needs_ranks: ClassVar[bool] = False

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(True, description="Train with the torch learner.")
    cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in CPU memory; needs several ranks."
    )
    reshard_after_forward: Literal["auto"] | bool = Field(
        "auto",
        description="Free gathered weights after each layer's forward pass, and reduce gradients in every micro-batch. false keeps whole "
        "weights and whole float32 gradients on each rank until the last micro-batch of a step, and communicates once: 6 bytes a weight in "
        "bfloat16. auto is false on GPUs of which that is at most a quarter. Pipeline stages always reduce in every micro-batch.",
    )
    sequence_parallel: bool = Field(False, description="Split activations between tensor-parallel ranks along the sequence.")
    activation_checkpointing: bool | Annotated[float, Field(ge=0, le=1)] = Field(
        False,
        description="Recompute activations in the backward pass: less memory, more time. true is all layers, and a number such as 0.5 that "
        "share of them, evenly spread.",
    )
    activation_offload: bool = Field(
        False,
        description="Keep activations in CPU memory between the forward and the backward pass, unless they are recomputed: less GPU "
        "memory, more time.",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks: they shard the linear layers (GPUs).")
    context_parallel_size: int = Field(
        1, ge=1, description="Context-parallel ranks: they shard the tokens of a micro-batch (GPUs)."
    )
    expert_parallel_size: int = Field(
        1,
        ge=1,
        description="Expert-parallel ranks: they shard the experts of a layer; 1, or a multiple of tensor_parallel_size (GPUs).",
    )
    dp_replicate_size: int = Field(
        1, ge=1, description="Replicas of the model, each sharded over its ranks (HSDP); 1 shards over all ranks (copies)."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, description="Pipeline-parallel ranks: they shard the decoder layers into stages (GPUs)."
    )
    pipeline_parallel_schedule: Literal["1F1B", "Interleaved1F1B"] = Field(
        "1F1B",
        description="Order of the stages' passes: 1F1B has one stage on each pipeline rank, Interleaved1F1B several, with less waiting.",
    )
    pipeline_parallel_layers_per_stage: int | None = Field(
        None,
        ge=1,
        description="Layers of each stage with Interleaved1F1B; null makes two stages on each pipeline rank (layers).",
    )
    custom_parallel_plan: str | None = Field(
        None,
        description="Dotted name of a tensor-parallel plan, a mapping from name patterns to styles, such as my_plans:PLAN; "
        "null is the model's own.",
    )
    lora_cfg: LoraConfig = subsection(LoraConfig)

    @property
    def adapters(self) -> LoraConfig:
        return self.lora_cfg

    @property
    def largest_size(self) -> int:
        return max(self.tensor_parallel_size, self.context_parallel_size, self.pipeline_parallel_size, self.expert_parallel_size)

    @property
    def ranks_of_one_copy(self) -> int:
        """The least number of ranks that the sizes shard a model over."""
        stage = max(self.tensor_parallel_size * self.context_parallel_size, self.expert_parallel_size)
        return stage * self.pipeline_parallel_size

    def warnings(self, key: str) -> Iterator[Problem]:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            yield Problem(
                f"{key}.sequence_parallel",
                "it has no effect: tensor_parallel_size is 1, so there are no ranks to shard the sequence over",
                "Set it to false, or raise tensor_parallel_size.",
            )
        if self.custom_parallel_plan is not None and self.tensor_parallel_size == 1:
            yield Problem(f"{key}.custom_parallel_plan", "it has no effect: tensor_parallel_size is 1")
        if self.pipeline_parallel_size == 1 and self.pipeline_parallel_schedule != "1F1B":
            yield Problem(f"{key}.pipeline_parallel_schedule", "it has no effect: pipeline_parallel_size is 1")

    def errors(self, key: str) -> Iterator[Problem]:
        if self.pipeline_parallel_layers_per_stage is not None and self.pipeline_parallel_schedule == "1F1B":
            yield Problem(
                f"{key}.pipeline_parallel_layers_per_stage",
                f"found {self.pipeline_parallel_layers_per_stage}, but with the schedule 1F1B the layers are split evenly over one "
                "stage on each pipeline rank",
                f"Set it to null, or {key}.pipeline_parallel_schedule=Interleaved1F1B.",
            )

    def size_errors(self, key: str, devices: int, *, uses_ray: bool) -> Iterator[Problem]:
        tensor, context, copies = self.tensor_parallel_size, self.context_parallel_size, self.dp_replicate_size
        stages = self.pipeline_parallel_size
        product = tensor * context * copies * stages
        if devices % product:
            where = f"{devices} devices that train" if uses_ray else "the one device of this process"
            sizes = {"tensor_parallel_size": tensor, "context_parallel_size": context, "dp_replicate_size": copies}
            if stages > 1:
                sizes["pipeline_parallel_size"] = stages
            name = max(
                sizes, key=lambda size: devices % sizes[size] > 0
            )  # the first size that alone does not divide, otherwise the first
            others = " and ".join(f"{other} = {size}" for other, size in sizes.items() if other != name)
            yield Problem(
                f"{key}.{name}",
                f"found {sizes[name]}, with {others}: these {product} ranks do not divide {where}",
                f"Raise cluster.gpus_per_node or cluster.num_nodes (a multiple of {product} devices must train), or lower the sizes.",
            )
        if (experts := self.expert_parallel_size) > 1:
            one_copy = max(1, devices // (copies * stages))
            if experts % tensor or one_copy % experts:
                yield Problem(
                    f"{key}.expert_parallel_size",
                    f"found {experts}; it must be a multiple of tensor_parallel_size = {tensor} and divide the {one_copy} ranks of one "
                    "copy of the model" + ("" if stages == 1 else f" in one of {stages} pipeline stages"),
                    f"Set it to 1, or to such a number, for instance {one_copy}." if one_copy % tensor == 0 else "Set it to 1.",
                )
        if self.cpu_offload and not uses_ray:
            yield Problem(
                f"{key}.cpu_offload",
                "found true, but only a learner on several ranks offloads its parameters, and this run has one",
                "Set it to false, or cluster.backend=ray; policy.reference.offload=true frees the reference policy's memory.",
            )


def find_stage_problems(
    key: str, model: str, layers: int, *, ranks: int, interleaved: bool, layers_per_stage: int | None
) -> Iterator[Problem]:
    """Yield why the ``layers`` of a model cannot be split into pipeline stages; ``key`` is the key of a ``dtensor_cfg``."""
    stages = ranks * (2 if interleaved else 1)
    if ranks == 1:
        return
    if interleaved and layers_per_stage is not None:
        if layers % (ranks * layers_per_stage):
            yield Problem(
                f"{key}.pipeline_parallel_layers_per_stage",
                f"found {layers_per_stage}, but {ranks} pipeline ranks cannot have equally many stages of this size for the {layers} "
                f"layers of {model}",
                f"Set it to a divisor of {layers // ranks}." if layers % ranks == 0 else "Set it to null.",
            )
    elif layers < stages:
        fitting = ranks * layers // stages
        yield Problem(
            f"{key}.pipeline_parallel_size",
            f"found {ranks}, which needs {stages} stages ({'Interleaved1F1B' if interleaved else '1F1B'}), and {model} has {layers} "
            "layers",
            f"Set it to at most {fitting}, or the schedule to 1F1B." if interleaved else f"Set it to at most {fitting}.",
        )

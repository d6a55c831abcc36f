"""How long the phases of a step take.

On GPUs the constants are fitted to step times that NVIDIA publishes of NeMo-RL (docs/planning.md lists each of them beside what is computed
here). On a CPU they are shares of its measured rates (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil

from strop.hardware.devices import Device, linked_devices
from strop.hardware.flops import PassCounts, forward_flops, training_flops
from strop.planning.learner_memory import LearnerFootprint, LearnerSetup
from strop.planning.learner_traffic import HOST_RATE, HOST_UPDATE_RATE, UPDATED, LearnerTraffic
from strop.planning.model_size import ModelSize

BFLOAT16, FLOAT32 = 2, 4  # bytes


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """What a system reaches of its hardware, and what it cannot hide."""

    training_share: float  # of the matrix rate, forward and backward; bubbles of a pipeline and collectives apart
    sparse_training_share: float  # the same of a model with experts
    bandwidth_share: float  # of the memory's bandwidth, decoding
    decoding_share: float  # of the matrix rate, decoding
    layer_seconds: float  # of a decoding step: launches and reductions that cannot be hidden, within a node
    remote_seconds: float  # further ones of a layer whose reductions leave the node
    sequence_seconds: float  # of a decoding step for each sequence: sampling and scheduling on the host
    arm_sequence_seconds: float  # the same of a host with Arm cores, as GB200 has
    sync_bytes_per_second: float  # of all weights, from learner to engines
    exposed_sync: float  # share of it that generation and training beside each other wait for
    fixed_seconds: float  # of each step
    between_bytes: float = (
        0.0  # of memory's bandwidth that norms, activations and casts take, forward or backward, for a token, a layer
    )
    # and a number of the hidden width; 0: they are in the share of the matrix rate


# Fitted to the published rows of NeMo-RL (benchmarks/plan_step_times.py); ``training_share`` of dense models is an assumption: no dense
# model is among the rows.
GPU_RATES = StepRates(
    training_share=0.35,
    sparse_training_share=0.096,
    bandwidth_share=0.53,
    decoding_share=0.5,
    layer_seconds=2.3e-4,
    remote_seconds=9.3e-5,
    sequence_seconds=5.5e-5,
    arm_sequence_seconds=2.35e-4,
    sync_bytes_per_second=2.0e10,
    exposed_sync=0.45,
    fixed_seconds=0.2,
)
CPU_RATES = StepRates(
    training_share=1.0,  # beside what is between the products
    sparse_training_share=0.4,
    bandwidth_share=0.7,
    decoding_share=0.6,
    layer_seconds=2e-5,
    remote_seconds=0.0,
    sequence_seconds=2e-5,
    arm_sequence_seconds=2e-5,
    sync_bytes_per_second=5e9,
    exposed_sync=1.0,
    fixed_seconds=0.05,
    between_bytes=710.0,
)


def rates_of(device: Device) -> StepRates:
    """Return the constants of a device of the table, or of this machine."""
    return CPU_RATES if device.measured else GPU_RATES


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step does."""

    rollouts: int
    prompt: float  # tokens, on average
    completion: float  # tokens, on average
    longest: float  # tokens of the longest completion, for which a synchronous step waits
    passes: float = 1.0  # over the batch that train: epochs
    scores: float = 0.0  # passes without gradients: reference, log-probabilities before the update
    optimizer_steps: float = 1.0  # that a pass over the batch takes
    generates: bool = True
    steps_ahead: int = 0  # 0: synchronous
    sharing: float = 1.0  # rollouts that share a prompt, which the learner reads once for them
    frozen: bool = False  # adapters are trained
    predicts: bool = True  # False: a critic, which has no output layer over the vocabulary
    moved_bytes: float = 0.0  # for each weight of a rank, from CPU memory to the device: a reference that is kept there

    @property
    def trained_tokens(self) -> float:
        """Tokens that the learner reads in a pass."""
        return self.rollouts * (self.completion + self.prompt / self.sharing)


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The devices of a step."""

    device: Device
    training_devices: int
    generation_devices: int
    shared: bool = True  # the same devices do both in turn
    engine_size: int = 1  # devices of an engine
    room: float | None = None  # sequences that an engine can decode at a time; None: all
    precision: str = "bfloat16"
    cache_precision_bytes: int = BFLOAT16
    rates: StepRates | None = None  # None: those of the device


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by phase. In an asynchronous run generation and training are beside each other."""

    generation: float
    logprobs: float
    training: float
    weight_sync: float
    other: float
    overlaps: bool
    exposed_sync: float = 1.0

    @property
    def total(self) -> float:
        if not self.overlaps:
            return self.generation + self.logprobs + self.training + self.weight_sync + self.other
        return max(self.generation, self.logprobs + self.training) + self.exposed_sync * self.weight_sync + self.other


@dataclass(frozen=True)
class BatchFlops:
    """FLOPs of passes over a batch."""

    forward: float
    training: float


@lru_cache(maxsize=64)
def _count_flops(model: ModelSize, work: StepWork) -> BatchFlops:
    """Count a group of rollouts: each reads its completion, and attends to the prompt that they share."""
    prompt, completion = round(work.prompt), round(work.completion)
    whole = PassCounts.of_lengths([prompt + completion], model.dimensions, predicted=completion)
    shared = PassCounts.of_lengths([prompt] if prompt else [], model.dimensions, predicted=0)
    again = (work.sharing - 1) / work.sharing  # of a prompt's work, which is not done
    counts = PassCounts(
        read=round(work.trained_tokens),
        predicted=whole.predicted * work.rollouts if work.predicts else 0,
        pairs={window: round((count - again * shared.pairs[window]) * work.rollouts) for window, count in whole.pairs.items()},
    )
    return BatchFlops(forward_flops(model.dimensions, counts), training_flops(model.dimensions, counts, frozen=work.frozen))


@dataclass(frozen=True)
class StepClock:
    """Computes the time of a step of a model."""

    model: ModelSize
    work: StepWork
    layout: StepLayout
    learner: LearnerSetup
    rates: StepRates = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", self.layout.rates or rates_of(self.layout.device))

    def time_step(self) -> StepTime:
        work, layout = self.work, self.layout
        overlaps = work.steps_ahead > 0 and not layout.shared
        return StepTime(
            generation=self.time_generation(),
            logprobs=self.time_scoring(),
            training=self.time_training(),
            weight_sync=self._weight_sync() if work.generates else 0.0,
            other=self.rates.fixed_seconds + work.moved_bytes * self.model.rank_weights(self.learner.sharding) / HOST_RATE,
            overlaps=overlaps,
            exposed_sync=self.rates.exposed_sync if overlaps else 1.0,
        )

    def time_learner(self) -> float:
        """Return the seconds of the learner's passes."""
        return self.time_scoring() + self.time_training()

    # --- generation ----------------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> float:
        """Sequences of a step's batch for each engine."""
        engines = max(1.0, self.layout.generation_devices / self.layout.engine_size)
        return self.work.rollouts / engines

    def read_prompts(self) -> float:
        """Return the seconds in which the engines read the prompts, each once for the rollouts that share it."""
        work, layout = self.work, self.layout
        flops = 2.0 * self.model.active_weights * work.rollouts * work.prompt / work.sharing
        return flops / (
            max(1, layout.generation_devices) * layout.device.peak_flops(layout.precision) * self.rates.decoding_share
        )

    def decoding_step(self, sequences: float) -> float:
        """Return the seconds in which an engine decodes a token of each of its sequences."""
        layout, rates = self.layout, self.rates
        context = self.work.prompt + self.work.completion / 2
        cache = layout.cache_precision_bytes * self.model.cache_width * context * sequences
        each = 4 if layout.precision == "float32" else 1 if layout.precision == "fp8" else BFLOAT16
        read = (each * self.model.weights_read(sequences) + cache) / layout.engine_size
        flops = 2.0 * self.model.active_weights * sequences / layout.engine_size
        memory = read / (layout.device.bandwidth_gb * 1e9 * rates.bandwidth_share)
        products = flops / (layout.device.peak_flops(layout.precision) * rates.decoding_share)
        remote = rates.remote_seconds if layout.engine_size > linked_devices(layout.device) else 0.0
        latency = self.model.num_layers * (rates.layer_seconds + remote)
        host = rates.arm_sequence_seconds if layout.device.name.startswith("GB") else rates.sequence_seconds
        return max(memory, products, latency) + host * sequences

    def time_generation(self) -> float:
        """Return the seconds of all decoding steps of a batch.

        A batch that is alone waits for its longest rollout; sequences beyond an engine's room take the places of finished ones. A run that
        is several steps ahead has as many batches in flight at a time, and nobody waits."""
        work, sequences = self.work, self.sequences
        if not work.generates:
            return 0.0
        room = sequences * max(1, work.steps_ahead) if self.layout.room is None else max(1.0, self.layout.room)
        if work.steps_ahead < 2:
            together = min(sequences, room)
            steps = work.longest + (sequences - together) / together * work.completion
            return self.read_prompts() + steps * self.decoding_step(sequences * work.completion / steps)  # finished ones leave
        together = min(sequences * work.steps_ahead, room)
        return self.read_prompts() + work.completion * sequences / together * self.decoding_step(together)

    # --- the learner's passes ------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Ranks, or groups of ranks, that read different micro-batches."""
        return max(1, self.layout.training_devices // self.learner.sharding.of_one_micro_batch)

    @property
    def busiest(self) -> float:
        """Rollouts of an optimizer step of the replica that has the most, over the average: more than 1 where few are left for each."""
        each = self.work.rollouts / self.work.optimizer_steps / self.replicas
        return ceil(each - 1e-9) / each

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a replica in an optimizer step."""
        tokens = self.work.trained_tokens / self.work.optimizer_steps / self.replicas
        return max(1.0, self.busiest * tokens / self.learner.tokens)

    @cached_property
    def _flops(self) -> BatchFlops:
        return _count_flops(self.model, self.work)

    @cached_property
    def traffic(self) -> LearnerTraffic:
        return LearnerTraffic(self.model, self.layout.device, self.learner.sharding)

    def time_training(self) -> float:
        """Return the seconds of forward and backward passes over the batch and of its optimizer steps."""
        learner = self.learner
        recomputed = learner.checkpointed_share
        flops = self._flops.training + recomputed * self._flops.forward
        each = FLOAT32 if self.layout.precision == "float32" else BFLOAT16
        updated = 0 if self.work.frozen else 2 * FLOAT32  # its gradient, read and written
        gradients = 0.0 if self.work.frozen else self.traffic.gather(FLOAT32) + self.traffic.copies()
        hidden = self.traffic.gather(2 * learner.weight_bytes) + gradients
        if learner.offloads_weights:
            hidden += (2 + learner.trained_share) * FLOAT32 * self.model.rank_weights(learner.sharding) / HOST_RATE
        if learner.offloads_activations and not learner.on_cpu:
            hidden += 2 * self._footprint.kept_activations / HOST_RATE
        once = (
            self._pass(flops, 2 + recomputed, (2 + recomputed) * each + updated, hidden)
            + self.work.optimizer_steps * self._optimizer_step()
        )
        return self.work.passes * once

    @cached_property
    def _footprint(self) -> LearnerFootprint:
        return LearnerFootprint(self.model, self.learner)

    def _optimizer_step(self) -> float:
        rate = HOST_UPDATE_RATE if self.learner.offloads_weights else self.layout.device.bandwidth_gb * 1e9
        return self.traffic.optimizer_step(self.learner.gradient_bytes) + UPDATED * self._footprint.rank_states / rate

    def time_scoring(self) -> float:
        if not self.work.scores:
            return 0.0
        each = FLOAT32 if self.layout.precision == "float32" else BFLOAT16
        flops, hidden = self._flops.forward, self.traffic.gather(self.learner.weight_bytes)
        if self.learner.offloads_weights:
            hidden += FLOAT32 * self.model.rank_weights(self.learner.sharding) / HOST_RATE
        return self.work.scores * self._pass(flops, 1, each, hidden)

    def _pass(self, flops: float, crossings: float, touched: float, hidden: float) -> float:
        """Return the seconds of passes over the batch, with the pipeline's bubble.

        ``crossings``: of the layers' collectives, which the products wait for; ``touched``: bytes of memory that a micro-batch reads and
        writes for a weight; ``hidden``: seconds of a micro-batch's transfers that are beside the products."""
        layout, stages, micro_batches = self.layout, self.learner.sharding.stages, self.micro_batches
        share = self.rates.sparse_training_share if self.model.experts else self.rates.training_share
        precision = "bfloat16" if layout.precision == "fp8" else layout.precision
        tokens = self.busiest * self.work.trained_tokens / self.replicas
        products = self.busiest * flops / (layout.training_devices * layout.device.peak_flops(precision) * share)
        read = touched * self._multiplied / (layout.device.bandwidth_gb * 1e9 * self.rates.bandwidth_share)
        all_micro_batches = micro_batches * self.work.optimizer_steps
        waited = crossings * (self.traffic.forward(tokens) + self._between())
        busy = max(self._largest_stage * products, read * all_micro_batches) + waited
        return (1 + (stages - 1) / micro_batches) * max(busy, hidden * all_micro_batches)

    def _between(self) -> float:
        """Return the seconds that a rank spends between its products, forward or backward over its share of the batch."""
        numbers = (
            self.busiest * self.work.trained_tokens * self.model.num_layers * self.model.hidden / self.layout.training_devices
        )
        return self.rates.between_bytes * numbers / (self.layout.device.bandwidth_gb * 1e9)

    @cached_property
    def _multiplied(self) -> float:
        """Weights that a rank multiplies with."""
        model, sharding = self.model, self.learner.sharding
        dense = (
            model.weights - model.expert_weights - (0 if model.dimensions.tied else model.embedding_weights)
        ) / sharding.tensor
        return (dense + model.expert_weights / sharding.expert) / sharding.stages

    @cached_property
    def _largest_stage(self) -> float:
        """The products of the slowest stage over those of the average one: layers do not divide evenly, and the last has the output."""
        stages, layers = self.learner.sharding.stages, self.model.num_layers
        if stages == 1:
            return 1.0
        head = self.model.embedding_weights
        output = head * layers / (self.model.active_weights - head)  # in layers
        most = ceil(layers / stages)
        last = most if layers % stages == 0 else max(1, (layers - most * (stages - 2)) // 2)
        return stages * max(most, last + output) / (layers + output)

    def _weight_sync(self) -> float:
        return BFLOAT16 * self.model.weights / self.rates.sync_bytes_per_second

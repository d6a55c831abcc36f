"""How long the phases of a step take.

On GPUs the constants are fitted to step times that NVIDIA publishes of NeMo-RL (docs/planning.md lists each of them beside what is computed
here). On a CPU they are shares of its measured rates (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from strop.hardware.devices import Device
from strop.hardware.flops import PassCounts, forward_flops, training_flops
from strop.planning.model_size import ModelSize

BFLOAT16 = 2  # bytes


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """What a system reaches of its hardware, and what it cannot hide."""

    training_share: float  # of the matrix rate, forward and backward, pipeline bubbles apart
    sparse_training_share: float  # the same of a model with experts
    bandwidth_share: float  # of the memory's bandwidth, decoding
    decoding_share: float  # of the matrix rate, decoding
    layer_seconds: float  # of a decoding step: launches and reductions that cannot be hidden, within a node
    remote_seconds: float  # further ones of a layer whose reductions leave the node
    sequence_seconds: float  # of a decoding step for each sequence: sampling and scheduling on the host
    sync_bytes_per_second: float  # of all weights, from learner to engines
    exposed_sync: float  # share of it that generation and training beside each other wait for
    fixed_seconds: float  # of each step


# Fitted to the published rows of NeMo-RL (benchmarks/plan_step_times.py); ``training_share`` of dense models is an assumption: no dense
# model is among the rows.
GPU_RATES = StepRates(
    training_share=0.35,
    sparse_training_share=0.084,
    bandwidth_share=0.92,
    decoding_share=0.5,
    layer_seconds=2.4e-4,
    remote_seconds=1.2e-4,
    sequence_seconds=5.9e-5,
    sync_bytes_per_second=2.2e10,
    exposed_sync=0.36,
    fixed_seconds=1.7,
)
GRACE_SEQUENCE_SECONDS = 1.8e-4  # of a host with Arm cores, as GB200 has
CPU_RATES = StepRates(
    training_share=0.8,
    sparse_training_share=0.4,
    bandwidth_share=0.7,
    decoding_share=0.6,
    layer_seconds=2e-5,
    remote_seconds=0.0,
    sequence_seconds=2e-5,
    sync_bytes_per_second=5e9,
    exposed_sync=1.0,
    fixed_seconds=0.05,
)


def rates_of(device: Device) -> StepRates:
    """Return the constants of a device of the table, or of this machine."""
    if device.measured:
        return CPU_RATES
    if device.name.startswith("GB"):
        return replace(GPU_RATES, sequence_seconds=GRACE_SEQUENCE_SECONDS)
    return GPU_RATES


def linked_devices(device: Device) -> int:
    """Return how many devices the fast links connect: those of a node, or of a rack (NVL72)."""
    return 72 if device.name.startswith("GB") else device.devices_per_node


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step does."""

    rollouts: int
    prompt: float  # tokens, on average
    completion: float  # tokens, on average
    longest: float  # tokens of the longest completion, for which a synchronous step waits
    passes: float = 1.0  # over the batch that train: epochs
    scores: float = 0.0  # passes without gradients: reference, log-probabilities before the update
    recomputes: float = 0.0  # share of the layers that compute their activations again
    generates: bool = True
    steps_ahead: int = 0  # 0: synchronous
    frozen: bool = False  # adapters are trained


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The devices of a step."""

    device: Device
    training_devices: int
    generation_devices: int
    shared: bool = True  # the same devices do both in turn
    engine_size: int = 1  # devices of an engine
    stages: int = 1  # of the learner's pipeline
    replicas: int = 1  # of the learner: data-parallel ranks
    packed_tokens: int = 8192  # of a micro-batch
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
class StepClock:
    """Computes the time of a step of a model."""

    model: ModelSize
    work: StepWork
    layout: StepLayout
    rates: StepRates = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", self.layout.rates or rates_of(self.layout.device))

    def time_step(self) -> StepTime:
        work, layout = self.work, self.layout
        overlaps = work.steps_ahead > 0 and not layout.shared
        return StepTime(
            generation=self._generation() if work.generates else 0.0,
            logprobs=work.scores * self._pass(forward_flops(self.model.dimensions, self._counts())),
            training=work.passes * self._training(),
            weight_sync=self._weight_sync() if work.generates else 0.0,
            other=self.rates.fixed_seconds,
            overlaps=overlaps,
            exposed_sync=self.rates.exposed_sync if overlaps else 1.0,
        )

    @property
    def sequences(self) -> float:
        """Sequences that an engine decodes at a time."""
        engines = max(1.0, self.layout.generation_devices / self.layout.engine_size)
        return self.work.rollouts / engines

    def decoding_step(self) -> float:
        """Return the seconds in which an engine decodes a token of each of its sequences."""
        layout, rates, sequences = self.layout, self.rates, self.sequences
        context = self.work.prompt + self.work.completion / 2
        cache = layout.cache_precision_bytes * self.model.dimensions.cache_width * context * sequences
        each = 4 if layout.precision == "float32" else 1 if layout.precision == "fp8" else BFLOAT16
        read = (each * self.model.weights_read(sequences) + cache) / layout.engine_size
        flops = 2.0 * self.model.dimensions.active_parameters * sequences / layout.engine_size
        memory = read / (layout.device.bandwidth_gb * 1e9 * rates.bandwidth_share)
        products = flops / (layout.device.peak_flops(layout.precision) * rates.decoding_share)
        remote = rates.remote_seconds if layout.engine_size > linked_devices(layout.device) else 0.0
        latency = self.model.num_layers * (rates.layer_seconds + remote)
        return max(memory, products, latency) + rates.sequence_seconds * sequences

    def _generation(self) -> float:
        """Return the seconds of all decoding steps. Where steps overlap by more than one, nobody waits for the longest rollout."""
        steps = self.work.longest if self.work.steps_ahead < 2 else self.work.completion
        return steps * self.decoding_step()

    def _counts(self) -> PassCounts:
        length = round(self.work.prompt + self.work.completion)
        one = PassCounts.of_lengths([length], self.model.dimensions, predicted=round(self.work.completion))
        pairs = {window: count * self.work.rollouts for window, count in one.pairs.items()}
        return PassCounts(read=one.read * self.work.rollouts, predicted=one.predicted * self.work.rollouts, pairs=pairs)

    def _training(self) -> float:
        """Return the seconds of a forward and backward pass over the batch, with the pipeline's bubble."""
        counts, model = self._counts(), self.model.dimensions
        flops = training_flops(model, counts, frozen=self.work.frozen) + self.work.recomputes * forward_flops(model, counts)
        return self._pass(flops)

    def _pass(self, flops: float) -> float:
        layout = self.layout
        share = self.rates.sparse_training_share if self.model.experts else self.rates.training_share
        precision = "bfloat16" if layout.precision == "fp8" else layout.precision
        length = self.work.prompt + self.work.completion
        micro_batches = max(1.0, self.work.rollouts * length / layout.replicas / layout.packed_tokens)
        bubble = 1 + (layout.stages - 1) / micro_batches
        return bubble * flops / (layout.training_devices * layout.device.peak_flops(precision) * share)

    def _weight_sync(self) -> float:
        return BFLOAT16 * self.model.weights / self.rates.sync_bytes_per_second

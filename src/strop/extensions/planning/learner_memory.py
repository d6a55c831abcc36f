"""The memory of a learner on one of its ranks: weights, gradients, optimizer, activations, and what the output layer needs.

The sizes are those of the tensors that ``models.layers``, ``models.attention`` and ``models.logprobs`` keep for the backward pass. They are
compared with what torch's allocator holds by ``benchmarks/plan_memory.py`` (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Any

from strop.extensions.performance.devices import DecoderDimensions, UnknownDimensions, dimensions_of, read_config


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Ranks that share a part of the learner. Adjacent ranks share tensors, then tokens, then FSDP's shards; stages are outermost."""

    shards: int = 1  # of weights, gradients and optimizer over data-parallel ranks (FSDP), context ranks among them
    replicate: int = 1  # copies of those shards (HSDP)
    optimizer_shards: int = 1  # of the optimizer alone (Megatron's distributed optimizer)
    tensor: int = 1
    context: int = 1
    stages: int = 1
    expert: int = 1  # ranks that have different experts, or parts of them
    expert_shards: int = 1  # of an expert rank's experts (FSDP)
    expert_optimizer_shards: int = 1  # of their optimizer alone (Megatron)
    sequence: bool = False  # norms and residuals are divided over tensor ranks too

    @property
    def dense(self) -> int:
        """Ranks that share a dense weight."""
        return self.shards * self.tensor * self.stages

    @property
    def experts(self) -> int:
        """Ranks that share the experts of a model."""
        return self.stages * self.expert * self.expert_shards


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The parallel sizes of a learner, as a configuration says them."""

    tensor: int = 1
    context: int = 1
    stages: int = 1
    expert: int = 1
    expert_tensor: int = 1  # Megatron Core alone
    replicate: int = 1  # the torch learner alone
    sequence: bool = False

    def shard(self, devices: int, *, megatron: bool) -> Sharding:
        """Return how these divide the learner over ``devices``."""
        stage = devices // self.stages
        data = stage // (self.tensor * self.context * self.replicate)
        if megatron:
            expert = self.expert * self.expert_tensor
            return Sharding(
                optimizer_shards=data * self.context,
                tensor=self.tensor,
                context=self.context,
                stages=self.stages,
                expert=expert,
                expert_optimizer_shards=max(1, stage // expert),
                sequence=self.sequence,
            )
        expert = max(self.expert, self.tensor)
        return Sharding(
            shards=data * self.context,
            replicate=self.replicate,
            tensor=self.tensor,
            context=self.context,
            stages=self.stages,
            expert=expert,
            expert_shards=data * self.context * self.tensor // expert,
            sequence=self.sequence,
        )


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder's dimensions with its name, its heads and its experts."""

    name: str
    dimensions: DecoderDimensions
    heads: int
    experts: int = 0  # of a layer
    active_experts: int = 0  # that a token is multiplied with

    @classmethod
    def from_config(cls, name: str, values: Mapping[str, Any]) -> ModelSize:
        """Read ``config.json``. Raises UnknownDimensions, whose message says what it lacks."""
        try:
            dimensions, config = dimensions_of(values), read_config(values).get_text_config()
        except UnknownDimensions as error:
            raise UnknownDimensions(f"{name}: {error}") from error
        counts = (getattr(config, key, None) for key in ("n_routed_experts", "num_experts", "num_local_experts"))
        experts = next(filter(None, counts), 0)
        return cls(
            name=name,
            dimensions=dimensions,
            heads=int(config.num_attention_heads),
            experts=int(experts),
            active_experts=int(config.num_experts_per_tok) if experts else 0,
        )

    @property
    def num_layers(self) -> int:
        return len(self.dimensions.layers)

    @property
    def hidden(self) -> int:
        return self.dimensions.hidden

    @cached_property
    def weights(self) -> int:
        return self.dimensions.parameters

    @cached_property
    def expert_weights(self) -> float:
        """Weights of the experts of all layers: what a token is not multiplied with, scaled up by the experts that it misses."""
        if not self.experts:
            return 0.0
        missed = sum(layer.resident - layer.mlp for layer in self.dimensions.layers)
        return missed * self.experts / (self.experts - self.active_experts)

    @cached_property
    def cache_width(self) -> int:
        """Numbers that a token leaves in the cache of all layers."""
        return self.dimensions.cache_width

    @cached_property
    def mlp_width(self) -> float:
        """Inner width of a layer's MLP, of experts those that a token goes through, on average over the layers."""
        return sum(layer.mlp for layer in self.dimensions.layers) / (3 * self.hidden * self.num_layers)

    @cached_property
    def layer_weights(self) -> float:
        """Weights of all layers: without the embedding and the output layer."""
        return float(sum(layer.attention + layer.resident for layer in self.dimensions.layers))

    @property
    def embedding_weights(self) -> int:
        return self.dimensions.hidden * self.dimensions.vocabulary

    def rank_weights(self, sharding: Sharding) -> float:
        """Weights that a rank of a learner holds."""
        return (self.weights - self.expert_weights) / sharding.dense + self.expert_weights / sharding.experts


FLOAT32, BFLOAT16 = 4, 2  # bytes
LOGIT_ROWS, GPU_LOGIT_ROWS = 1024, 4096  # at a time by default; a 32nd of 80 GB holds the second of 150,000 columns
MOST_KEPT_LOGITS = 512 * 2**20  # as models.logprobs.tiled_logprobs keeps for the backward pass
TILE_ROWS, TILE_COLUMNS = 512, 2048  # of logits on a CPU
PLAIN_SCORES = {FLOAT32: 1 << 20, BFLOAT16: 1 << 22}  # up to which a CPU computes attention by plain products
EAGER_SCORES = 1 << 25  # up to which plain products in bfloat16 keep the scores
MLP_TENSORS = 4  # of a gated MLP's width that are kept: gate, up, activation, product
MLP_GRADIENTS = 3  # of its width in the backward pass: of the product, gate and up
EXPERT_ROWS = 3  # of the hidden width that a layer keeps for each expert of a token: sorted inputs, outputs, weighted ones
GATHERED_LAYERS = 2  # that FSDP gathers at a time
JOINED_ALREADY = 0.4  # share of the weights that need no joined copy where they have the dtype of the products


@dataclass(frozen=True, kw_only=True)
class LearnerSetup:
    """What the memory of a learner depends on, besides the model."""

    tokens: int  # that a micro-batch reads
    longest: int  # tokens of the longest rollout
    on_cpu: bool = True
    compute_bytes: int = FLOAT32  # of a number in the products
    weight_bytes: int = FLOAT32  # of a weight that the network reads
    gradient_bytes: int = FLOAT32  # of a gradient that is kept over micro-batches
    optimizer_numbers: float = 2  # that the optimizer keeps for a weight
    trained_share: float = 1.0  # of the weights
    checkpointed_share: float = 0.0  # of the layers, which compute their activations again
    offloads_activations: bool = False
    offloads_weights: bool = False  # weights and optimizer stay in CPU memory
    logit_rows: int = LOGIT_ROWS  # policy.logprob_chunk_size
    micro_batches: int = 2  # of an optimizer step
    sharding: Sharding = field(default_factory=Sharding)


@dataclass(frozen=True)
class LearnerFootprint:
    """Bytes of a learner on one rank."""

    model: ModelSize
    setup: LearnerSetup

    @cached_property
    def rank_weights(self) -> float:
        """Weights that this rank holds."""
        return self.model.rank_weights(self.setup.sharding)

    @cached_property
    def rank_states(self) -> float:
        """Weights whose optimizer state and masters this rank holds."""
        sharding = self.setup.sharding
        experts = self.model.expert_weights / sharding.experts
        dense = (self.rank_weights - experts) / sharding.optimizer_shards
        return self.setup.trained_share * (dense + experts / sharding.expert_optimizer_shards)

    @property
    def weights(self) -> float:
        """Bytes of the weights, with float32 masters of weights of lower precision."""
        masters = FLOAT32 * self.rank_states if self.setup.weight_bytes < FLOAT32 else 0.0
        return self.setup.weight_bytes * self.rank_weights + masters

    @property
    def gradients(self) -> float:
        return 0.0 if self.setup.offloads_weights else self.setup.gradient_bytes * self.rank_weights * self.setup.trained_share

    @property
    def optimizer(self) -> float:
        return FLOAT32 * self.setup.optimizer_numbers * self.rank_states

    @property
    def static(self) -> float:
        """Bytes of weights and optimizer, which are held between steps."""
        return 0.0 if self.setup.offloads_weights else self.weights + self.optimizer

    @property
    def stage_layers(self) -> int:
        """Layers of the largest stage."""
        return ceil(self.model.num_layers / self.setup.sharding.stages)

    @property
    def layer_weights(self) -> float:
        """Weights of one layer that this rank multiplies with."""
        model, sharding = self.model, self.setup.sharding
        dense = (model.layer_weights - model.expert_weights) / sharding.tensor
        return (dense + model.expert_weights / sharding.expert) / model.num_layers

    @property
    def weight_copies(self) -> float:
        """Bytes of weights in the dtype of the products: cast once for a pass, on a CPU packed once more; of FSDP's those of two layers."""
        setup = self.setup
        layers = float(GATHERED_LAYERS) if setup.sharding.shards > 1 else self.stage_layers
        same = setup.weight_bytes == setup.compute_bytes
        if setup.on_cpu:
            copies = 0.0 if setup.compute_bytes == FLOAT32 else 2.0 - (JOINED_ALREADY if same else 0.0)
        else:
            copies = 0.0 if same else 1.0
        return copies * setup.compute_bytes * self.layer_weights * layers

    @cached_property
    def gathered(self) -> float:
        """Bytes of weights that FSDP gathers: embedding and output layer for a whole pass, and two layers."""
        model, sharding = self.model, self.setup.sharding
        if sharding.shards == 1:
            return 0.0
        ends = (model.weights - model.layer_weights) / sharding.tensor
        layer = (model.layer_weights - model.expert_weights) / sharding.tensor
        layer += model.expert_weights / sharding.expert if sharding.expert_shards > 1 else 0.0
        return self.setup.weight_bytes * (ends + GATHERED_LAYERS * layer / model.num_layers)

    @property
    def head_gradient(self) -> float:
        """Bytes of the output layer's gradient, which FSDP keeps whole until the end of a backward pass."""
        sharded = self.setup.sharding.shards > 1 and self.setup.trained_share == 1
        return self.setup.weight_bytes * self.model.embedding_weights / self.setup.sharding.tensor if sharded else 0.0

    @cached_property
    def layer_activations(self) -> float:
        """What one layer keeps for its backward pass (bytes)."""
        setup, sharding = self.setup, self.setup.sharding
        each, tokens = setup.compute_bytes, setup.tokens / sharding.context
        residual = (2 * self.model.hidden * (setup.weight_bytes + each) + 2 * FLOAT32) / (
            sharding.tensor if sharding.sequence else 1
        )
        divided = (self._attention_numbers() + MLP_TENSORS * self.model.mlp_width) * each + FLOAT32 * self.model.heads
        rows = EXPERT_ROWS * self.model.active_experts * self.model.hidden * setup.weight_bytes
        return (
            tokens * (residual + divided / sharding.tensor + rows / (sharding.tensor if sharding.sequence else 1))
            + self.kept_scores
        )

    def _attention_numbers(self) -> float:
        """Numbers that a token's queries, keys, values and output keep."""
        layer = self.model.dimensions.layers[0]
        query, keys = layer.query_width, layer.cache_width / 2
        if layer.value_width != query:  # latent attention keeps keys and values of every head
            return 2.0 * query + 2 * layer.value_width + layer.cache_width
        if not self.setup.on_cpu or self.setup.compute_bytes == FLOAT32:
            return 2.0 * query + 2 * keys + (query if self.is_plain else 0)
        return 3.0 * query + 3 * keys  # values are a view of what queries, keys and values were computed into

    @property
    def scores(self) -> float:
        """Pairs of tokens of the rollouts of a micro-batch, of one head."""
        return max(1.0, self.setup.tokens / self.setup.longest) * self.setup.longest**2

    @property
    def is_plain(self) -> bool:
        """Whether attention is computed by plain products: the scores of a micro-batch, without shared prompts, are few."""
        return self.setup.on_cpu and self.model.heads * self.scores <= PLAIN_SCORES[self.setup.compute_bytes]

    @property
    def kept_scores(self) -> float:
        """Scores of plain attention in bfloat16 on a CPU, in float32 and in bfloat16, and the mask (bytes)."""
        eager = self.setup.compute_bytes == BFLOAT16 and self.is_plain and self.model.heads * self.scores <= EAGER_SCORES
        return self.scores * (self.model.heads * (FLOAT32 + BFLOAT16) + 1) if eager else 0.0

    @cached_property
    def activations(self) -> float:
        """What all layers of this rank keep between the forward and the backward pass (bytes)."""
        setup, sharding = self.setup, self.setup.sharding
        if setup.offloads_activations and not setup.on_cpu:
            return 2 * self.layer_activations  # two layers on their way
        held = sharding.stages if setup.micro_batches > 1 else 1  # micro-batches on their way through a pipeline (1F1B)
        return held * self.kept_activations

    @cached_property
    def kept_activations(self) -> float:
        """What all layers of this rank keep of a micro-batch (bytes), wherever."""
        setup, sharding = self.setup, self.setup.sharding
        kept = setup.weight_bytes * self.model.hidden * setup.tokens / sharding.context
        kept /= sharding.tensor if sharding.sequence else 1
        recomputed = round(self.stage_layers * setup.checkpointed_share)
        return (self.stage_layers - recomputed) * self.layer_activations + recomputed * kept

    @cached_property
    def layer_backward(self) -> float:
        """What the backward pass of a layer holds besides (bytes): gradients of an MLP, and a layer's activations computed again."""
        setup, sharding = self.setup, self.setup.sharding
        gradients = MLP_GRADIENTS * self.model.mlp_width * setup.compute_bytes / sharding.tensor + 2 * self.model.hidden * FLOAT32
        again = self.layer_activations if setup.checkpointed_share > 0 else 0.0
        return again + gradients * setup.tokens / sharding.context

    @cached_property
    def output_layer(self) -> float:
        """What the log-probabilities need at the beginning of the backward pass (bytes)."""
        setup, sharding = self.setup, self.setup.sharding
        rows, each, hidden = setup.tokens / sharding.context, setup.compute_bytes, self.model.hidden
        columns = self.model.dimensions.vocabulary / sharding.tensor
        logits = min(MOST_KEPT_LOGITS, FLOAT32 * setup.logit_rows * columns, rows * columns * each)
        states = rows * hidden * (setup.weight_bytes + each + FLOAT32)
        gradient = setup.weight_bytes if setup.trained_share == 1 else 0
        head = columns * hidden * (gradient + (each if each < setup.weight_bytes else 0))
        return logits + states + head + self._tile(rows, columns, sums=min(columns, TILE_COLUMNS) * hidden * FLOAT32)

    def _tile(self, rows: float, columns: float, *, sums: float = 0.0) -> float:
        """Bytes of the tile of logits that is computed at a time. ``sums``: of a tile's rows of the output layer's gradient."""
        setup = self.setup
        if not setup.on_cpu:
            return min(rows, setup.logit_rows) * columns * FLOAT32
        each = FLOAT32 + (setup.compute_bytes if setup.compute_bytes < FLOAT32 else 0)
        return min(rows, TILE_ROWS, setup.logit_rows) * min(columns, TILE_COLUMNS) * each + sums

    @property
    def training_peak(self) -> float:
        """The most bytes at once in a step: gradients of earlier micro-batches, activations and the output layer."""
        passing = self.static + self.weight_copies + self.gathered
        at_output = self.activations + max(self.output_layer, self.layer_backward + self.head_gradient)
        if self.setup.micro_batches > 1:
            return passing + self.gradients + at_output
        return passing + max(at_output, self.gradients + self.layer_activations + self.layer_backward)

    @property
    def scoring_peak(self) -> float:
        """The most bytes at once in a pass without gradients."""
        setup, hidden = self.setup, self.model.hidden
        rows, each = setup.tokens / setup.sharding.context, setup.compute_bytes
        columns = self.model.dimensions.vocabulary / setup.sharding.tensor
        mlp = rows * (hidden * (setup.weight_bytes + each) + MLP_TENSORS * self.model.mlp_width * each / setup.sharding.tensor)
        head = rows * hidden * (setup.weight_bytes + each) + columns * hidden * (each if each < setup.weight_bytes else 0)
        return (
            self.static + self.weight_copies + self.gathered + max(mlp + self.kept_scores, head + 2 * self._tile(rows, columns))
        )

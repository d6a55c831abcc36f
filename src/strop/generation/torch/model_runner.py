"""Forward passes of the embedded engine: tokens in, next-token logits out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from strop.columns import Columns, TokenColumn
from strop.device_copies import is_gpu, move, upload
from strop.generation.quantized_rollouts import EmulatedQuantization, RoundedCache
from strop.generation.torch.decode_kernels import DecodeKernels
from strop.generation.torch.fast_layers import FastLayers, choose_kernels
from strop.generation.torch.fast_linears import FastLinears
from strop.generation.torch.image_tokens import ImageReader, PromptImages
from strop.generation.torch.kv_cache import (
    INDEX_KEYS,
    CacheShape,
    DecodePlan,
    EnginePlan,
    ImageRuns,
    PrefillPlan,
    Prefix,
    PrefixStore,
    SlotCache,
)
from strop.generation.torch.mixer_states import StateKey, StateShape
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.models.adapters import base_weights
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers.indexers import IndexRows, PathBlocks
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows
from strop.models.network import Network
from strop.models.recorded_columns import name_recorders, stack_columns
from strop.types import PromptImage

if TYPE_CHECKING:
    from strop.generation.torch.cuda_graphs import DecodeGraphs

log = logging.getLogger(__name__)

PROBE_LENGTH = 8
PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # mean difference of log-probabilities in nats, far above rounding


def slot_table(count: int) -> Tensor:
    """Return the page table [count, 1] of the first slots, with one page per slot."""
    return torch.arange(count, dtype=torch.int32)[:, None]


@dataclass(frozen=True)
class SlotPrompt:
    """A prompt and the slot to prefill it into."""

    slot: int
    tokens: tuple[int, ...]  # image tokens have ids below 0, which identify them (``image_tokens``)
    session: str = ""
    images: PromptImages | None = None

    def positions(self, first: int, last: int) -> Tensor:
        """Return the rotary positions of the tokens in places [first, last): [L], or [3, L] if images give tokens three
        positions.
        """
        rotary = None if self.images is None else self.images.rotary
        return torch.arange(first, last) if rotary is None or self.images is None else self.images.positions(first, last)


def join_positions(prompts: Sequence[SlotPrompt], skipped: Sequence[int]) -> Tensor:
    """Return the rotary positions of the tokens of each prompt after the skipped ones, concatenated: [T], or [3, T]."""
    positions = [prompt.positions(skip, len(prompt.tokens)) for prompt, skip in zip(prompts, skipped, strict=True)]
    if all(each.dim() == 1 for each in positions):
        return torch.cat(positions)
    return torch.cat([each.expand(3, -1) for each in positions], 1)


def collect_images(prompts: Sequence[SlotPrompt]) -> dict[int, PromptImage]:
    """Return the images of prompts by number."""
    return {number: image for prompt in prompts if prompt.images for number, image in prompt.images.numbered.items()}


class ModelRunner(Protocol):
    """Runs the model for up to ``slots`` sequences. Running sequences always occupy the first slots."""

    network: Network
    slots: int
    length: int  # maximum sequence length of a slot
    images: ImageReader | None  # of a network that reads images
    verifies_drafts: bool  # whether several tokens of a sequence can be decoded in one pass

    def count_unread(self, prompt: SlotPrompt) -> int:
        """Return the number of uncached tokens of a prompt, which would have to be computed."""
        ...

    def reserve(self, prompt: SlotPrompt) -> bool:
        """Reserve memory for a prompt that the next ``prefill`` reads into the first free slot. Return whether there was enough."""
        ...

    def read_ahead(self, prompt: SlotPrompt, budget: int) -> int:
        """Read up to ``budget`` tokens of a prompt that is not admitted yet, and cache them. Return the number of tokens read."""
        ...

    def prefill(self, prompts: Sequence[SlotPrompt]) -> Tensor:
        """Prefill prompts into their reserved slots, and return the logits after each, [B, V]."""
        ...

    def extend(self, lengths: Sequence[int]) -> bool:
        """Make room for these lengths in the first B slots. Return whether there was memory for all."""
        ...

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B slots and return the logits after each, [B, V]."""
        ...

    def decode_drafts(self, rows: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        """Append several tokens to each of the first B slots, the first at ``positions``; return the logits after each token, [T, V].

        Only for runners with ``verifies_drafts``. Tokens that turn out wrong are overwritten by later ones.
        """
        ...

    def release(self, slot: int) -> None:
        """Free the memory of a slot whose request has ended or waits again."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first ``length`` positions of the last slot ``source`` to the released slot ``target``."""
        ...

    def store_session(self, slot: int, session: str, tokens: tuple[int, ...]) -> None:
        """Store a conversation's prefix for its next turn."""
        ...

    def read_columns(self, slot: int, length: int) -> Columns:
        """Return what was recorded of a slot's first ``length`` tokens, [length, ...] each, on the CPU."""
        ...

    def activate(self) -> None:
        """Prepare for generation with new weights: drop everything computed with the old ones."""
        ...

    def deactivate(self) -> None:
        """Restore the module for the learner."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights used for generation, by canonical name: stale copies if there are any, otherwise the module's own."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop the stored prefixes of prompts and conversations."""
        ...


def cache_capacity(
    network: Network, shape: CacheShape, config: TorchGenerationConfig, length: int, stored: int | None = None
) -> int:
    """Return the number of tokens that fit into the configured memory. Raises ValueError if one sequence of ``length`` tokens
    does not fit.

    ``stored``: tokens stored for such a sequence; None: ``length``. Its states take the memory of ``shape.state_tokens`` more.
    """
    stored = stored or length
    memory = config.cache_memory_gb(_gpu_memory_gb(network.device))
    capacity = int(memory * 2**30 // shape.bytes_per_token)
    if capacity < stored + shape.state_tokens:
        needed = stored * shape.bytes_per_token / 2**30
        states = f" and {shape.state_bytes / 2**30:.3g} GiB for the states of its recurrent layers" if shape.states else ""
        raise ValueError(
            f"policy.generation.torch_cfg.kv_cache_memory_gb = {memory:.3g} GiB holds {capacity} tokens, but one "
            f"sequence of policy.max_total_sequence_length = {length} tokens needs {needed:.3g} GiB{states}; raise the first or lower "
            "the second"
        )
    return capacity


def _gpu_memory_gb(device: torch.device) -> float | None:
    """Return the memory of a GPU (GiB); None for a CPU."""
    return torch.get_device_module(device).get_device_properties(device).total_memory / 2**30 if is_gpu(device) else None


class FixedSlots:
    """Memory management of a runner whose slots are all large enough for the longest sequence: none needed."""

    verifies_drafts = False

    def reserve(self, prompt: SlotPrompt) -> bool:
        return True

    def read_ahead(self, prompt: SlotPrompt, budget: int) -> int:
        return 0

    def extend(self, lengths: Sequence[int]) -> bool:
        return True

    def decode_drafts(self, rows: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def release(self, slot: int) -> None:
        return None


class PlanRunner:
    """Common parts of runners with a key-value cache: weights, and the pass of a model that follows an attention plan."""

    def __init__(
        self, network: Network, config: TorchGenerationConfig, *, length: int, quantization: EmulatedQuantization | None = None
    ) -> None:
        self.network = network
        self.length = length
        self.quantization = quantization
        self.shape, self.specs = infer_cache_layout(network)
        self.images = None if network.vision is None else ImageReader(network.vision)
        self.offsets: Tensor | None = None  # [slots], offset of the rotary positions of each slot's new tokens
        self.kernels = _choose_kernels(network, config, quantization)
        self.prepack = config.prepack_weights
        self.linears = self._make_linears()
        self.layers: FastLayers | None = None
        self._checked = False  # the kernels were compared with the modules
        if self.kernels is not None:
            self.layers = FastLayers(network, self.linears, self.kernels, self.specs, length)

    def _make_linears(self) -> FastLinears:
        network = self.network
        decoder = None if self.images is None else network.decoder
        return FastLinears(
            network.model,
            network.precision,
            prepack=self.prepack,
            kernels=self.kernels,
            decoder=decoder,
            quantization=self.quantization,
        )

    def _make_offsets(self, slots: int) -> None:
        """Store the offsets between rotary positions and places, for a model in which images change them."""
        if self.images is not None and self.images.has_rotary_positions:
            self.offsets = torch.zeros(slots, dtype=torch.int64, device=self.network.device)

    def _set_offset(self, prompt: SlotPrompt) -> None:
        if self.offsets is not None:
            self.offsets[prompt.slot] = 0 if prompt.images is None else prompt.images.offset

    def _move_offset(self, source: int, target: int) -> None:
        if self.offsets is not None:
            self.offsets[target] = self.offsets[source]

    def _find_runs(self, tokens: Sequence[int]) -> ImageRuns | None:
        return None if self.images is None else self.images.find_runs(tokens)

    @torch.no_grad()
    def _forward(self, tokens: Tensor, positions: Tensor, plan: EnginePlan, rows: Tensor | None) -> Tensor:
        """Return the logits [B, V] at ``rows`` of the tokens [T]; None: at all tokens. ``positions``: rotary, [T] or [3, T]."""
        device = self.network.device
        options = name_recorders(plan.recorders)
        rounds = self.quantization is not None and self.quantization.plan.fp8_cache
        options["plan"] = RoundedCache(plan) if rounds else plan
        places = positions[None] if positions.dim() == 1 else positions[:, None]
        ids, places, *last = move([tokens[None], places, *([] if rows is None else [rows])], device)
        with self.network.autocast():
            inputs = self.read_images(tokens, plan.images) if plan.images else {"input_ids": ids}
            output = self.network.decoder(**inputs, position_ids=places, use_cache=False, **options)
            hidden = output.last_hidden_state[0]
            hidden = hidden.index_select(0, last[0]) if last else hidden
            if self.network.exact is not None:
                return self.network.exact.compute_logits(hidden, self.network.head)
            layer = self.network.model.get_output_embeddings()
            logits: Tensor = self.network.head.transform_logits(layer(hidden))
            return logits

    def read_images(self, tokens: Tensor, images: Mapping[int, PromptImage]) -> dict[str, Any]:
        """Return the decoder's inputs for tokens with images; the tower uses the learner's own modules."""
        assert self.images is not None
        return self.images.make_inputs(tokens, images)

    def activate(self) -> None:
        self.reset_prefix_cache()
        if self.images is not None:
            self.images.forget()
        self.network.use_plan_attention()
        probes = self.layers is not None and not self._checked
        expected = self._probe_decoding(None) if probes and self.quantization is None else None
        if self.network.exact is None:
            self.linears.enable()
            if probes and self.quantization is not None:  # modules and kernels are compared once they have the same weights
                expected = self._probe_decoding(None)
        else:
            self.network.exact.forget_weights()
        if self.layers is not None:
            self.layers.refresh()
            if expected is not None and bool(expected.isfinite().all()):
                self._check_kernels(self.layers, expected)

    def _probe_decoding(self, layers: FastLayers | None) -> Tensor:
        """Decode two tokens of two sequences with the kernels, or with the modules; return the last log-probabilities, [2, V]."""
        cache = SlotCache(self.shape, 2, PROBE_LENGTH)
        for position in range(2):
            tokens, positions = torch.tensor([position + 1, position + 5]), torch.full((2,), position)
            if layers is None:
                logits = self._forward(tokens, positions, DecodePlan(cache, positions, PROBE_LENGTH), None)
            else:
                logits = layers.decode(tokens, positions, slot_table(2), cache)
        return logits.float().log_softmax(-1)

    def _check_kernels(self, layers: FastLayers, expected: Tensor) -> None:
        """Compare the kernels' log-probabilities with the modules', once. If they differ, decode with the modules and log a
        warning.
        """
        self._checked = True
        error = (self._probe_decoding(layers) - expected).abs().mean().item()
        if error < PROBE_ERROR[self.network.precision]:
            return
        log.warning(
            "decoding with the model's own modules, which is slower than with compiled kernels: their log-probabilities of %s differ "
            "by %.2g",
            type(self.network.model).__name__,
            error,
        )
        self.linears.disable()
        self.kernels = self.layers = None
        self.linears = self._make_linears()
        self.linears.enable()

    def deactivate(self) -> None:
        if self.network.exact is None:
            self.linears.disable()
        self.network.use_learner_attention()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        stale = self.linears.find_stale_copies()
        if self.layers is not None:
            stale |= self.layers.find_stale_norms()
        exact = self.network.exact
        for name, tensor in base_weights(self.network.model):
            found = stale.get(name) if exact is None else exact.find_stale(tensor)
            yield name, tensor if found is None else found

    def reset_prefix_cache(self) -> None:
        raise NotImplementedError


def _choose_kernels(
    network: Network, config: TorchGenerationConfig, quantization: EmulatedQuantization | None
) -> DecodeKernels | None:
    wanted = config.compiled_kernels
    if quantization is not None and quantization.needs_modules:
        if wanted:
            raise ValueError(
                "policy.generation.torch_cfg.compiled_kernels is true, but the kernels do not round the inputs of layers, which "
                f"{quantization.plan.weights.name} needs; set it to null"
            )
        if wanted is None and network.device.type == "cpu":
            log.info("decoding with the model's own modules, which round their inputs to %s", quantization.plan.weights.name)
        return None
    return choose_kernels(network, wanted, prepack=config.prepack_weights)


class CachedRunner(FixedSlots, PlanRunner):
    """Runs a network with a key-value cache of fixed slots, each as long as the longest sequence."""

    def __init__(
        self, network: Network, config: TorchGenerationConfig, *, length: int, quantization: EmulatedQuantization | None = None
    ) -> None:
        """Raises ValueError if the configured memory cannot hold one sequence of ``length`` tokens."""
        super().__init__(network, config, length=length, quantization=quantization)
        stored = length if self.shape.exact is None else self.shape.round_span(length)
        capacity = cache_capacity(network, self.shape, config, length, stored)
        size = stored + self.shape.state_tokens
        self.slots = min(config.max_num_seqs, capacity // size)
        self.cache = SlotCache(self.shape, self.slots, stored, network.recorded_columns)
        self._make_offsets(self.slots)
        self.prefixes = PrefixStore(capacity - self.slots * size, self.shape.state_tokens)
        self.graphs = self._make_graphs() if config.cuda_graphs else None

    def _make_graphs(self) -> DecodeGraphs | None:
        if self.network.exact is not None or not is_gpu(self.network.device):
            return None
        from strop.generation.torch.cuda_graphs import DecodeGraphs, capture_obstacle

        states = "its layers carry states from token to token" if self.shape.states else None
        indexed = "its indexers choose tokens" if self.shape.indexed else None
        obstacle = states or indexed or capture_obstacle(self.network.model)
        if obstacle is not None:
            log.warning("decoding %s without CUDA graphs: %s", type(self.network.model).__name__, obstacle)
            return None
        return DecodeGraphs(self._decode_static, self.slots, self.network.device)

    def count_unread(self, prompt: SlotPrompt) -> int:
        prefix = self.prefixes.find(prompt.tokens, prompt.session)
        return len(prompt.tokens) - (prefix.length if prefix is not None else 0)

    def prefill(self, prompts: Sequence[SlotPrompt]) -> Tensor:
        cached = {prompt.tokens: self.prefixes.find(prompt.tokens, prompt.session) for prompt in prompts}
        missing = {tokens for tokens, prefix in cached.items() if prefix is None or prefix.length < len(tokens)}
        if missing:
            unread = {prompt.tokens: prompt for prompt in prompts if prompt.tokens in missing}
            cached |= self._prefill_uncached(list(unread.values()), cached)
        logits = []
        for prompt in prompts:
            prefix = cached[prompt.tokens]
            assert prefix is not None and prefix.logits is not None
            self.prefixes.put(prompt.tokens, prefix)
            self.cache.write_prefix(prompt.slot, prefix)
            self._set_offset(prompt)
            logits.append(prefix.logits)
        return torch.stack(logits)

    def _prefill_uncached(
        self, prompts: Sequence[SlotPrompt], cached: Mapping[tuple[int, ...], Prefix | None]
    ) -> dict[tuple[int, ...], Prefix | None]:
        """Run one forward pass over the uncached part of each prompt."""
        prefixes = [cached[prompt.tokens] for prompt in prompts]
        skipped = [prefix.length if prefix is not None else 0 for prefix in prefixes]
        lengths = [len(prompt.tokens) - skip for prompt, skip in zip(prompts, skipped, strict=True)]
        runs = [self._find_runs(prompt.tokens) for prompt in prompts]
        mixing = self.cache.states.open_prompts(lengths, [{} if prefix is None else prefix.states for prefix in prefixes])
        plan = PrefillPlan(self.shape, lengths, prefixes, runs, mixing)
        tokens = torch.tensor([token for prompt, skip in zip(prompts, skipped, strict=True) for token in prompt.tokens[skip:]])
        positions = join_positions(prompts, skipped)
        last = torch.tensor(lengths).cumsum(0) - 1
        plan.recorders = self.network.record_columns()
        plan.images = collect_images(prompts)
        logits = self._forward(tokens, positions, plan, last)
        recorded = stack_columns(plan.recorders)
        return {
            prompt.tokens: plan.build_prefix(index, prompt.tokens, logits[index], recorded)
            for index, prompt in enumerate(prompts)
        }

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self.graphs is not None:
            logits = self.graphs(tokens, positions)
            if logits is not None:
                return logits
            self.graphs = None
        if self.layers is not None:
            return self.layers.decode(torch.tensor(tokens), torch.tensor(positions), slot_table(len(tokens)), self.cache)
        span = min(self.shape.round_span(max(positions) + 1), self.cache.length)
        inputs = upload([tokens, positions], torch.int64, self.network.device)
        return self._decode_static(inputs[0], inputs[1], span)

    def _decode_static(self, tokens: Tensor, positions: Tensor, span: int | None = None) -> Tensor:
        with self.cache.states.decoding([0] * len(tokens), [1] * len(tokens)) as mixing:
            plan = DecodePlan(self.cache, positions, span or self.length, mixing)
            plan.recorders = self.network.record_columns()
            logits = self._forward(tokens, self._rotate(positions, len(tokens)), plan, None)
        for column, values in stack_columns(plan.recorders).items():
            self.cache.columns[column][plan.rows, positions] = values
        return logits

    def _rotate(self, positions: Tensor, count: int) -> Tensor:
        """Return the rotary positions of the new tokens in the first slots, [B]."""
        return positions if self.offsets is None else positions + self.offsets[:count]

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)
        self._move_offset(source, target)

    def store_session(self, slot: int, session: str, tokens: tuple[int, ...]) -> None:
        self.prefixes.put(session, self.cache.read_prefix(slot, tokens))

    def read_columns(self, slot: int, length: int) -> Columns:
        columns = {column: held for column, held in self.cache.columns.items() if column is not INDEX_KEYS}
        return {column: column.cut(held[slot, :length], length).to("cpu", copy=True) for column, held in columns.items()}

    def reset_prefix_cache(self) -> None:
        self.prefixes.clear()


class RecomputeRunner(FixedSlots):
    """Recomputes every sequence at every token, for models whose attention cannot use the key-value cache: as a packed row, or padded.

    Slow, but correct for any causal language model; it reads text only.
    """

    images: ImageReader | None = None

    def __init__(self, network: Network, *, max_slots: int, length: int) -> None:
        self.network = network
        self.slots = max_slots
        self.length = length
        self._tokens: dict[int, list[int]] = {}
        self._columns: dict[
            int, dict[TokenColumn, Tensor]
        ] = {}  # of each slot [tokens or more, ...], of the last pass that read it

    def count_unread(self, prompt: SlotPrompt) -> int:
        return len(prompt.tokens)

    def prefill(self, prompts: Sequence[SlotPrompt]) -> Tensor:
        for prompt in prompts:
            self._tokens[prompt.slot] = list(prompt.tokens)
        return self._logits([prompt.slot for prompt in prompts])

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        for slot, token in enumerate(tokens):
            self._tokens[slot].append(token)
        return self._logits(range(len(tokens)))

    @torch.no_grad()
    def _logits(self, slots: Sequence[int]) -> Tensor:
        recorders, device = self.network.record_columns(), self.network.device
        rows = [torch.tensor(self._tokens[slot]) for slot in slots]
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        if self.network.packed:
            starts = lengths.cumsum(0) - lengths
            plan = TreePlan(starts, lengths, torch.full_like(lengths, -1), device, self.network.attention_kernel)
            inputs = {"input_ids": torch.cat(rows)[None].to(device), "position_ids": plan.positions[None], "plan": plan}
            real = torch.ones(1, int(lengths.sum()), dtype=torch.bool)
        else:
            inputs = {"input_ids": pad_sequence(rows, batch_first=True).to(device), "attention_mask": real.long().to(device)}
        with self.network.autocast():
            output = self.network.decoder(**inputs, use_cache=False, **name_recorders(recorders))
            self._columns.update({slot: {} for slot in slots})
            for column, values in stack_columns(recorders).items():
                for slot, of_slot in zip(slots, values.cpu()[real.flatten()].split(lengths.tolist()), strict=True):
                    self._columns[slot][column] = of_slot
            last = output.last_hidden_state[real.to(device)][(lengths.cumsum(0) - 1).to(device)]
            return self.network.head.compute_logits(last)

    def move(self, source: int, target: int, length: int) -> None:
        self._tokens[target] = self._tokens.pop(source)
        self._columns[target] = self._columns.pop(source)

    def store_session(self, slot: int, session: str, tokens: tuple[int, ...]) -> None:
        return None

    def read_columns(self, slot: int, length: int) -> Columns:
        return {column: column.cut(values[:length], length).clone() for column, values in self._columns[slot].items()}

    def activate(self) -> None:
        self.network.use_learner_attention()

    def deactivate(self) -> None:
        self.network.use_learner_attention()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return base_weights(self.network.model)

    def reset_prefix_cache(self) -> None:
        return None


class _ShapeRecorder:
    """A plan that only records the shapes of keys and states, and the options of each layer."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}  # of layers with keys of their own
        self.sizes: list[tuple[int, int, int]] = []  # of these: heads, sizes of a key and of a value
        self.shared: dict[int, int] = {}
        self.specs: list[AttentionSpec] = []
        self.states: dict[StateKey, StateShape] = {}
        self.index_sizes: dict[int, int] = {}  # layer -> size of an indexer's key

    def blocks(self, size: int) -> PathBlocks:
        raise ValueError(f"a layer attends to blocks of {size} tokens, which no cache holds")

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        if rows.block > 1:
            raise ValueError(f"layer {layer} chooses blocks of {rows.block} tokens, for which no cache holds keys")
        self.index_sizes[layer] = rows.key.shape[1]
        return rows.choose_everything()

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        channels, size = weight.shape
        self.states["convolution", spec] = StateShape((size - 1, channels), weight.dtype)
        return inputs

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        outputs, state = recurrence([each[None] for each in rows])
        self.states["scan", spec] = StateShape(tuple(state.shape[1:]), state.dtype)
        return outputs[0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.layer in self.keys:
            raise ValueError(f"layer {spec.layer} attends more than once, which no cache holds")
        same = (layer for layer, earlier in self.keys.items() if earlier.data_ptr() == key.data_ptr())
        if (owner := next(same, None)) is not None:
            self.shared[spec.layer] = owner
        else:
            self.keys[spec.layer] = key
            self.sizes.append((*key.shape[1:], value.shape[2]))
        self.specs.append(spec)
        return query.new_zeros(*query.shape[:2], value.shape[2])


def infer_cache_shape(network: Network) -> CacheShape:
    """Infer the cache shape of a model from one forward pass. Raises ValueError if a layer attends more than once, or nothing is held."""
    return infer_cache_layout(network)[0]


@torch.no_grad()
def infer_cache_layout(network: Network) -> tuple[CacheShape, list[AttentionSpec]]:
    """Infer the cache shape of a model, and the attention options of each layer, from one forward pass.

    Raises ValueError as ``infer_cache_shape``.
    """
    recorder = _ShapeRecorder()
    network.use_plan_attention()
    token = torch.zeros(1, 1, dtype=torch.int64, device=network.device)
    network.decoder(input_ids=token, position_ids=token, plan=recorder, use_cache=False)
    network.use_learner_attention()
    layers = list(recorder.keys)
    if not (layers or recorder.states):
        raise ValueError("no layer attends or carries a state")
    heads, size, value_size = (max(sizes, default=0) for sizes in zip(*recorder.sizes, strict=True)) if layers else (0, 0, 0)
    exact = network.exact  # float32 keys: attention reads them as stored, without a cast per step
    dtype = network.precision if exact is None else torch.float32
    shape = CacheShape(
        layers=len(layers),
        heads=heads,
        head_size=size,
        value_size=value_size,
        dtype=dtype,
        device=network.device,
        exact=exact,
        attending=() if layers == list(range(len(layers))) else tuple(layers),
        shared=recorder.shared,
        states=recorder.states,
        indexed=tuple(recorder.index_sizes),
        index_size=max(recorder.index_sizes.values(), default=0),
    )
    return shape, recorder.specs

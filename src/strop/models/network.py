"""A causal language model as used by the learner: hidden states at the positions that predict a batch's tokens.

A model whose layers follow a plan (attention through Transformers' interface, known mixers) reads packed rows with shared
prefixes. A probe detects a model that cannot; it reads padded rows instead, one rollout per row, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from strop.algorithms.base import CANDIDATES, SQUARED_PROBS, TokenOutputs
from strop.models.adapters import disable_adapters
from strop.models.attention.attention_interface import IMPLEMENTATION
from strop.models.attention.attention_plan import AttentionPlan
from strop.models.attention.kernel_choice import AttentionKernel
from strop.models.attention.tree_plan import TreePlan
from strop.models.layers.compiled_layers import CompiledLayers
from strop.models.layers.fused_layers import FusedLayers, enable_fused_layers
from strop.models.loading import is_vision_config
from strop.models.logprobs.lm_head import ROWS, LMHead, get_lm_head
from strop.models.logprobs.token_logprobs import token_logprobs
from strop.models.mixers.mixer_interface import install_mixers
from strop.models.mixers.recorded_choices import IndexedLayers, find_indexed_layers
from strop.models.network_parts import DraftHead, FixedOrder
from strop.models.packing_probe import CannotPack, LayerProbe, check_structure
from strop.models.recorded_columns import RecordedColumn, Recorders, ReplayedColumn
from strop.models.routing.recorded_experts import ReplayedRoutes, RoutedLayers
from strop.models.routing.router_config import RouterLossConfig
from strop.models.routing.router_observer import ObservedRouters, RouterObserver
from strop.models.routing.router_replay import install_router_replay, replayable_layers
from strop.models.vision.vision_processor import VisionProcessor
from strop.models.vision.vision_tower import VisionTower, packed_inputs, padded_inputs
from strop.sampling import KEPT_TOKENS, Sampling, at_least_float32
from strop.types import Batch

OutputsT = TypeVar("OutputsT")  # a dataclass of tensors with one row for each predicted token


class TokenSharding(Protocol):
    """How devices share the tokens and the predicted tokens of a micro-batch."""

    def shard_tokens(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, AttentionPlan]:
        """[T] tokens and positions -> those of this device, and the plan for their attention."""
        ...

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """Hidden states of this device's tokens -> those of all T tokens, [T or more, H]."""
        ...

    def shard_layers(self, column: Tensor, padding: int, *, mixing: bool = False) -> Tensor:
        """[T, ...] -> the rows that this device's layers compute between attentions, or in them with ``mixing``; rows of ``padding``
        where there is no token.
        """
        ...

    def add_counts(self, counts: Tensor) -> Tensor:
        """Return the sum of the counts of all devices."""
        ...

    def shard_predictions(self, column: Tensor) -> Tensor:
        """[N, ...] -> the rows that this device predicts."""
        ...

    def gather_outputs(self, outputs: OutputsT, size: int) -> OutputsT:
        """Outputs of this device's predictions -> all N = ``size`` outputs, equal on all devices."""
        ...


class NoTokenSharding:
    """A single device reads all tokens."""

    def shard_tokens(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, AttentionPlan]:
        return tokens, positions, plan

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def shard_layers(self, column: Tensor, padding: int, *, mixing: bool = False) -> Tensor:
        return column

    def add_counts(self, counts: Tensor) -> Tensor:
        return counts

    def shard_predictions(self, column: Tensor) -> Tensor:
        return column

    def gather_outputs(self, outputs: OutputsT, size: int) -> OutputsT:
        return outputs


class Network:
    """A Hugging Face causal LM behind one call: batch -> hidden states [N, H] -> log-probabilities [N]."""

    def __init__(
        self,
        model: Any,
        *,
        precision: torch.dtype = torch.float32,
        chunk: int | None = None,
        packed: bool | None = None,
        attention_kernel: AttentionKernel = "auto",
    ) -> None:
        """``packed``: True reads packed rows, False padded rows, and None probes the model."""
        self.model = name_base_model(model)
        self.precision = precision
        self.chunk = chunk
        self.attention_kernel: AttentionKernel = attention_kernel  # of packed rows
        self.device = next(model.parameters()).device
        self.fused_layers: FusedLayers = enable_fused_layers(model)  # used in the learner's passes
        self.compiled_layers: CompiledLayers | None = None  # with policy.compile: used instead
        self.token_sharding: TokenSharding = NoTokenSharding()
        self.routed: RoutedLayers | None = None  # with router replay
        self.observed_routers: ObservedRouters | None = None  # with router losses
        self.indexed: IndexedLayers | None = None  # with replay of what indexers chose
        self.replay_counts: dict[str, Tensor] = {}  # column -> since the last read: (token, layer) pairs that differ, compared
        self.exact: FixedOrder | None = None  # of an extension
        self.draft: DraftHead | None = None  # of an extension
        self.vision: VisionTower | None = None  # with a processor of images
        self.no_vision = ""  # why a model with a vision tower reads no images
        self.received: Tensor | None = None  # [t, H], from the previous pipeline stage: this one does not embed the tokens
        self.fallback: str | None = None  # why the model cannot read packed rows
        self.recurrent = install_mixers(self.model)  # whether layers carry a state from token to token
        self.packed = self._probe() if packed is None else packed
        self.use_learner_attention()

    def supports_attention_plans(self) -> bool:
        """Return whether the model's layers follow a plan, which the engine's cache requires."""
        return self.packed or (self.fallback is None and self._probe())

    def use_plan_attention(self) -> None:
        """Follow the attention plan of each call, for an engine."""
        set_attention(self.model, IMPLEMENTATION)

    def use_native_attention(self) -> None:
        """Use the model's native attention, for padded rows."""
        set_attention(self.model, _native_attention(self.model))

    def use_learner_attention(self) -> None:
        """Use the learner's attention: the plan of packed rows, or the model's native attention for padded rows."""
        set_attention(self.model, IMPLEMENTATION if self.packed else _native_attention(self.model))

    @property
    def head(self) -> LMHead:
        return get_lm_head(self.model)

    @property
    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.get_decoder()
        return decoder

    @property
    def reads_plain_rows(self) -> bool:
        """Whether it reads the tokens, positions and sources of a packed row unchanged, so that they may already be on its
        device.
        """
        whole = isinstance(self.token_sharding, NoTokenSharding)
        return self.packed and whole and self.vision is None and not self.recorded_columns and self.draft is None

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[R] int64 -> embeddings [R, H]."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def enable_router_replay(self) -> None:
        """Enable recording an engine's experts and training with recorded ones. Raises ValueError for a model without experts."""
        self.routed = install_router_replay(self.model)

    def enable_indexer_replay(self, longest: int) -> None:
        """Enable recording what an engine's indexers chose for rollouts of up to ``longest`` tokens, and training with it. Raises
        ValueError for a model without indexers, or that reads padded rows.
        """
        if not self.packed:
            raise ValueError(
                f"policy.router_replay.indexers: {type(self.model).__name__} reads padded rows ({self.fallback or 'as configured'}), in "
                "which indexers choose by themselves; set it to false"
            )
        self.indexed = find_indexed_layers(self.model, longest)

    def observe_routers(self, config: RouterLossConfig, section: str) -> None:
        """Add router losses to the gradient of observed passes, and count expert load. Raises ValueError without experts."""
        self.observed_routers = ObservedRouters(self.model, config, section)

    def _observe(self, batch: Batch, source: Tensor | None = None) -> Mapping[str, RouterObserver]:
        """Return the decoder's keyword argument that observes the routers of a pass. ``source``: as for replay."""
        if self.observed_routers is None:
            return {}
        columns = (batch.source if source is None else source, batch.sequence, batch.mask)
        places, sequence, mask = (column.to(self.device) for column in columns)
        return self.observed_routers.observe(places, sequence, mask, batch.totals.tokens)

    def enable_vision(self, processor: VisionProcessor) -> None:
        """Enable image inputs, using the model's vision tower."""
        self.vision = VisionTower(self.model, processor)

    def disable_vision(self, reason: str) -> None:
        """Read only text; a batch with images is then an error that gives ``reason``."""
        self.vision, self.no_vision = None, reason

    def _check_no_images(self, batch: Batch) -> None:
        """Raise ValueError if a batch has images that this network cannot read."""
        if batch.images:
            raise ValueError(
                f"a batch has images, and {type(self.model).__name__} reads only text"
                + (f" ({self.no_vision})" if self.no_vision else "")
                + ": name a vision-language model (policy.model_name), or leave the images out of the data"
            )

    @property
    def recorded_columns(self) -> Sequence[RecordedColumn]:
        """What the passes of an engine record of the tokens that they read."""
        owners: tuple[RecordedColumn | None, ...] = (self.routed, self.indexed)
        return [each for each in owners if each is not None]

    def record_columns(self) -> Recorders:
        """Return what records these columns in one pass."""
        return {each.column: each.record() for each in self.recorded_columns}

    def _replay(self, batch: Batch, source: Tensor | None = None) -> dict[str, ReplayedColumn]:
        """Return the keyword arguments of the decoder that replay what was recorded for a batch.

        ``source`` [N]: for padded rows, the positions (over all rows) from which the predicted tokens are predicted.
        """
        replayed: dict[str, ReplayedColumn] = {}
        for owner in self.recorded_columns:
            column = owner.column
            if column.name not in batch.read_columns:
                continue
            recorded, fill = batch.read_columns[column.name], int(column.fill)
            if source is not None:
                recorded = pad_sequence(_read_rows(batch, recorded), batch_first=True, padding_value=fill).flatten(0, 1)
            counted = torch.bincount(batch.source if source is None else source, minlength=len(recorded))
            mixing = owner is self.indexed
            local = (
                self.token_sharding.shard_layers(values, padding, mixing=mixing).to(self.device)
                for values, padding in ((recorded, fill), (counted, 0))
            )
            replayed[column.name] = owner.replay(*local)
        return replayed

    def _count_differences(self, replayed: Mapping[str, ReplayedColumn]) -> None:
        for name, each in replayed.items():
            if isinstance(each, ReplayedRoutes):
                each.check(replayable_layers(self.decoder))
            counts = self.token_sharding.add_counts(each.counts)
            self.replay_counts[name] = counts + self.replay_counts.get(name, 0)

    def autocast(self) -> torch.autocast:
        """Return bfloat16 autocast if that is the precision, else a context without effect."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == torch.bfloat16)

    def disable_adapters(self) -> AbstractContextManager[None]:
        """Disable the adapters, which yields the reference policy of a LoRA run without extra memory."""
        return disable_adapters(self.model)

    def outputs(self, batch: Batch, sampling: Sampling) -> TokenOutputs:
        """Return log-probabilities and entropies of the batch's predicted tokens, [N] each, on the network's device.

        With a column ``candidates``, also return the log-probabilities [N, K] of these token ids. With a column ``kept_tokens``, the
        distribution is restricted to these token ids. With a column ``squared_probs``, also return ``log_sum_sq_probs``.
        """
        columns = (batch.columns.get(CANDIDATES), batch.columns.get(KEPT_TOKENS))
        candidates, kept = (
            None if column is None else self.token_sharding.shard_predictions(column).to(self.device) for column in columns
        )
        target = self.token_sharding.shard_predictions(batch.target).to(self.device)
        with self.autocast():
            hidden = self.hidden(batch)
            squares = SQUARED_PROBS in batch.columns
            if self.exact is not None:
                return self.exact.token_logprobs(
                    hidden, target, self.head, sampling, self.chunk or ROWS, candidates, squared_probs=squares
                )
            outputs = token_logprobs(hidden, target, self.head, sampling, self.chunk, candidates, kept, squared_probs=squares)
        return self.token_sharding.gather_outputs(outputs, len(batch.target))

    def hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states [N, H] that predict the batch's tokens; with token sharding, only this device's."""
        return self._hidden_packed(batch) if self.packed else self._hidden_padded(batch)

    def _hidden_packed(self, batch: Batch) -> Tensor:
        hidden = self.token_sharding.gather_hidden(self.run_decoder(batch))
        return hidden.index_select(0, self.token_sharding.shard_predictions(batch.source).to(self.device))

    def run_decoder(self, batch: Batch) -> Tensor:
        """Return the decoder's hidden states [t, H] of this device's tokens in a packed row."""
        replayed = self._replay(batch)
        output = self.decoder(**self._packed_inputs(batch), use_cache=False, **replayed, **self._observe(batch))
        self._count_differences(replayed)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _packed_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the keyword arguments of the decoder for a packed row."""
        tree = self._plan_tree(batch)
        if self.vision is not None:
            return packed_inputs(self.vision, batch, tree, self.device)
        self._check_no_images(batch)
        tokens, positions, plan = self.token_sharding.shard_tokens(batch.tokens, batch.positions, tree)
        inputs = {"input_ids": tokens[None].to(self.device)} if self.received is None else {"inputs_embeds": self.received[None]}
        return {**inputs, "position_ids": positions[None].to(self.device), "plan": plan}

    def _plan_tree(self, batch: Batch) -> AttentionPlan:
        segments = (batch.segment_start, batch.segment_length, batch.segment_parent)
        if self.exact is not None:
            return self.exact.plan_tree(*segments, self.device)
        return TreePlan(*segments, self.device, self.attention_kernel)

    def _hidden_padded(self, batch: Batch) -> Tensor:
        rows = _read_rows(batch, batch.tokens)
        longest = max(len(row) for row in rows)
        row, column = _source_rows(batch), batch.positions[batch.source]
        replayed = self._replay(batch, row * longest + column)
        observed = self._observe(batch, row * longest + column)
        reader: Callable[..., Any]
        if self.vision is None:
            reader, arguments = self.decoder, self._padded_text(batch, rows)
        else:
            reader, arguments = padded_inputs(self.vision, batch, rows, self.device)
        output = reader(**arguments, use_cache=False, **replayed, **observed)
        self._count_differences(replayed)
        hidden: Tensor = output.last_hidden_state
        return hidden[row.to(self.device), column.to(self.device)]

    def _padded_text(self, batch: Batch, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Return the keyword arguments of the decoder for padded rows without images."""
        self._check_no_images(batch)
        longest = max(len(row) for row in rows)
        tokens, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
            mask[index, : len(row)] = 1
        return {"input_ids": tokens.to(self.device), "attention_mask": mask.to(self.device)}

    @torch.no_grad()
    def _probe(self) -> bool:
        """Return whether packed rows yield the same log-probabilities as single sequences with the model's native attention."""
        batch = probe_batch(int(self.model.get_input_embeddings().weight.shape[0]))
        native, probe = _native_attention(self.model), LayerProbe(self.decoder, places_of_tokens(batch))
        try:
            set_attention(self.model, native)
            expected = _compute_logprobs(self, self._hidden_padded(batch), batch, direct=True)
            with probe.read_alone():
                padded = _compute_logprobs(self, self._hidden_padded(batch), batch)
            if not torch.allclose(padded, expected, atol=1e-3, rtol=1e-3):
                raise ValueError(
                    f"{type(self.model).__name__} transforms its logits after the output layer in a way that Strop does not support"
                )
            check_structure(self.decoder)
            set_attention(self.model, IMPLEMENTATION)
            with probe.read_together():
                packed = _compute_logprobs(self, self._hidden_packed(batch), batch)
            probe.check()
            error = (packed - padded).abs().max().item()
            if error < 1e-3:
                return True
            self.fallback = f"its log-probabilities differ by {error:.2g} when sequences share a row"
        except CannotPack as reason:
            self.fallback = str(reason)
        except (TypeError, RuntimeError, KeyError, AttributeError, IndexError, AssertionError) as error:
            self.fallback = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warnings.warn(
            f"{type(self.model).__name__} cannot read packed rows ({self.fallback}); it reads padded rows instead: every rollout "
            "computes its prompt again, and padding costs time and memory",
            stacklevel=3,
        )
        return False


def set_attention(model: Any, implementation: str) -> None:
    """Set the attention implementation of a language model. A vision tower keeps its own, because it reads each image whole."""
    model.set_attn_implementation({"text_config": implementation} if is_vision_config(model.config) else implementation)


def _native_attention(model: Any) -> str:
    softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    # Transformers' sdpa silently ignores the softcap of Gemma 2's attention.
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not softcapped else "eager"


def _read_rows(batch: Batch, column: Tensor) -> list[Tensor]:
    """Return the rows of a column [T, ...], one per path of the rollouts."""
    segments = column.split(batch.segment_length.tolist())
    return [torch.cat([segments[segment] for segment in path]) for paths in batch.rollout_paths() for path in paths]


def places_of_tokens(batch: Batch) -> Tensor:
    """[R, L] int64: the token of a packed row that is at each place of the padded rows; -1: padding."""
    return pad_sequence(_read_rows(batch, torch.arange(len(batch.tokens))), batch_first=True, padding_value=-1)


def _source_rows(batch: Batch) -> Tensor:  # [N] int64
    """Return the row of each predicted token: the first path of its rollout that contains its source."""
    if batch.leaf_sequence is None:
        return batch.sequence
    rows: dict[tuple[int, int], int] = {}  # (rollout, segment) -> path
    owned = ((sequence, path) for sequence, paths in enumerate(batch.rollout_paths()) for path in paths)
    for row, (sequence, path) in enumerate(owned):
        for segment in path:
            rows.setdefault((sequence, segment), row)
    segment_of = torch.arange(len(batch.segment_start)).repeat_interleave(batch.segment_length)[batch.source]
    return torch.tensor([rows[key] for key in zip(batch.sequence.tolist(), segment_of.tolist(), strict=True)])


def _compute_logprobs(network: Network, hidden: Tensor, batch: Batch, *, direct: bool = False) -> Tensor:
    """Compute log-probabilities with Strop's LM head, or with ``direct`` through the model's own forward pass."""
    if not direct:
        return token_logprobs(hidden, batch.target.to(network.device), network.head, Sampling(), network.chunk).logprobs
    logprobs: list[Tensor] = []
    rows = _read_rows(batch, batch.tokens)
    logits = [network.model(input_ids=row[None].to(network.device), use_cache=False).logits[0] for row in rows]
    for sequence, source, target in zip(batch.sequence.tolist(), batch.source.tolist(), batch.target.tolist(), strict=True):
        logprobs.append(at_least_float32(logits[sequence][int(batch.positions[source])]).log_softmax(-1)[target])
    return torch.stack(logprobs)


def probe_batch(vocabulary: int) -> Batch:
    """Build a batch of two groups with shared prompts of different lengths, without an algorithm."""
    from strop.types import Totals

    tokens: list[int] = []
    positions: list[int] = []
    columns: dict[str, list[int]] = {name: [] for name in ("start", "parent", "source", "target", "sequence", "leaf", "group")}

    def token(seed: int) -> int:
        return (seed * 7919 + 13) % vocabulary

    def segment(length: int, parent: int, position: int) -> int:
        columns["start"].append(len(tokens))
        columns["parent"].append(parent)
        tokens.extend(token(len(tokens) + offset) for offset in range(length))
        positions.extend(range(position, position + length))
        return len(columns["start"]) - 1

    for group, (prompt, completions) in enumerate([(5, (3, 6)), (9, (4, 1))]):
        root = segment(prompt, -1, 0)
        end_of_prompt = len(tokens) - 1
        for length in completions:
            start = len(tokens)
            leaf = segment(length, root, prompt)
            sources = [end_of_prompt, *range(start, start + length)]
            columns["source"] += sources
            columns["target"] += [token(1000 + source) for source in sources]
            columns["sequence"] += [len(columns["leaf"])] * len(sources)
            columns["leaf"].append(leaf)
            columns["group"].append(group)
    predicted = len(columns["source"])
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        segment_start=torch.tensor(columns["start"]),
        segment_parent=torch.tensor(columns["parent"]),
        source=torch.tensor(columns["source"]),
        target=torch.tensor(columns["target"]),
        sequence=torch.tensor(columns["sequence"]),
        rollout_logprobs=torch.zeros(predicted),
        versions=torch.zeros(predicted, dtype=torch.int32),
        advantages=torch.zeros(predicted),
        mask=torch.ones(predicted),
        leaf=torch.tensor(columns["leaf"]),
        group=torch.tensor(columns["group"]),
        rewards=torch.zeros(len(columns["leaf"])),
        totals=Totals(predicted, len(columns["leaf"]), 2),
    )


def name_base_model(model: Any) -> Any:
    """Make a causal LM's ``base_model`` its decoder: Transformers' text class for Llama 4 names an attribute that it does not
    have.
    """
    if model.base_model is model and model.get_output_embeddings() is not None:
        embeddings = model.get_input_embeddings()
        for name, child in model.named_children():
            if child is not embeddings and any(module is embeddings for module in child.modules()):
                model.base_model_prefix = name
    return model


def disable_dropout(model: nn.Module) -> Sequence[str]:
    """Disable dropout and return where it was active: probability ratios between two dropout masks would measure only the masks.

    Model families have it as modules and as numbers (``attention_dropout``, ``hidden_dropout``, ``resid_pdrop``).
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                names.append(name)
    return names


def freeze_routers(model: nn.Module) -> Sequence[str]:
    """Freeze the weights that choose the experts of each token, and return their names; empty for a model without experts."""
    names = [
        f"{name}.{child}.{weight}"
        for name, block in model.named_modules()
        for child in ("gate", "router")
        if isinstance(getattr(block, "experts", None), nn.Module) and isinstance(getattr(block, child, None), nn.Module)
        for weight, _ in getattr(block, child).named_parameters()
    ]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names

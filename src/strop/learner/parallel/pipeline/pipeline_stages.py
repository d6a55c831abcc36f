"""The stages of a decoder: the layers of each rank, and running only some of the layers.

Every rank has the ordinary model with the ordinary names. Its own forward pass runs the layers of a stage: the other layers and
the final norm are skipped, and hidden states replace the token embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.learner.parallel.dtensor_config import find_stage_problems
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.models.network import Network
from strop.problems import raise_problems

KEY = "dtensor_cfg.pipeline_parallel_size"


class PassedLayer(nn.Module):
    """Replaces a decoder layer or norm that another stage runs: returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Decoders read attributes of their layers, such as the attention type, to choose the arguments they pass to them.
        vars(self).update({name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)})

    def forward(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        # Layers that share the choice of an indexer return it with their output.
        return (hidden_states, kwargs["prev_topk_indices"]) if "prev_topk_indices" in kwargs else hidden_states


def shares_choice(layer: nn.Module) -> bool:
    """Return whether a decoder layer attends to the tokens that an earlier layer's indexer chose."""
    return any(getattr(module, "skip_topk", False) is True for module in layer.modules())


class PipelineStages:
    """The stages of a network's decoder. Stage ``i`` is on pipeline rank ``i % dims.pipeline``.

    The first stage embeds the tokens, the last one has the final norm and the output layer, and the numbers of layers differ by
    at most one. Raises ValueError for a decoder that cannot be cut.
    """

    def __init__(self, network: Network, dims: ParallelDims) -> None:
        decoder: Any = network.decoder
        self.network = network
        self.name = type(network.model).__name__
        if not network.packed:
            raise ValueError(
                f"{self.name} reads padded rows ({network.fallback or 'as configured'}), and pipeline parallelism needs packed rows; set "
                f"{KEY}=1 and use only data parallelism"
            )
        children = {name: child for name, child in decoder.named_children() if any(True for _ in child.parameters())}
        lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList)]
        embeddings = [name for name, child in children.items() if child is network.model.get_input_embeddings()]
        self._norms = sorted(children.keys() - {*lists, *embeddings})
        if not len(lists) == len(embeddings) == len(self._norms) == 1:
            raise ValueError(
                f"{type(decoder).__name__} of {self.name} is not an embedding, a list of layers and a norm (it has {', '.join(children)}), "
                f"so it cannot be cut into pipeline stages; set {KEY}=1"
            )
        self.decoder = decoder
        self.embedding: Any = children[embeddings[0]]
        self.layers: nn.ModuleList = children[lists[0]]  # type: ignore[assignment]
        self.count = _count_stages(len(self.layers), dims, self.name)
        self.ranks = dims.pipeline
        shared = [index for index, layer in enumerate(self.layers) if shares_choice(layer)]
        cut = [index for index in shared if self.stage_of_layer(index) != self.stage_of_layer(index - 1)]
        if cut:
            raise ValueError(
                f"layer {cut[0]} of {self.name} attends to the tokens that an indexer of an earlier layer chose, and would begin a stage; "
                f"set {KEY} to a number of stages that begin with layers that choose, or to 1"
            )

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage of a layer. If the layers do not divide evenly, the first stages have one layer more."""
        size, larger = divmod(len(self.layers), self.count)
        first_smaller = larger * (size + 1)
        return layer // (size + 1) if layer < first_smaller else larger + (layer - first_smaller) // size

    def stages_of_rank(self, rank: int) -> list[int]:
        return list(range(rank, self.count, self.ranks))

    def parameter_ranks(self) -> dict[str, set[int]]:
        """Return the pipeline ranks that have each parameter: several for a tied embedding, which the first and the last stage
        use.
        """
        stages = {id(parameter): 0 for parameter in self.embedding.parameters()}
        for index, layer in enumerate(self.layers):
            stages |= {id(parameter): self.stage_of_layer(index) for parameter in layer.parameters()}
        last = self.count - 1
        below = {id(module) for part in (self.embedding, self.layers) for module in part.modules()}
        others = (module for module in self.network.model.modules() if id(module) not in below)
        outside = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
        return {
            name: {stages.get(id(parameter), last) % self.ranks} | ({last % self.ranks} if id(parameter) in outside else set())
            for name, parameter in self.network.model.named_parameters()
        }

    @contextmanager
    def run_only(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Make the decoder run only the layers of one stage, on hidden states [t, H] from the previous stage."""
        replaced: list[tuple[Any, str]] = [
            (self.layers, str(index)) for index in range(len(self.layers)) if self.stage_of_layer(index) != stage
        ]
        replaced += [(self.decoder, self._norms[0])] if stage < self.count - 1 else []
        modules = [parent._modules[name] for parent, name in replaced]
        for (parent, name), module in zip(replaced, modules, strict=True):
            parent._modules[name] = PassedLayer(module)
        self.network.received = received
        try:
            yield
        finally:
            self.network.received = None
            for (parent, name), module in zip(replaced, modules, strict=True):
                parent._modules[name] = module

    @torch.no_grad()
    def check_passing(self, rows: int) -> None:
        """Raises ValueError for a decoder that changes hidden states between stages, such as by scaling them or adding positions."""
        device = self.network.device
        hidden = torch.linspace(-1, 1, rows * self.embedding.weight.shape[1], device=device).view(rows, -1)
        positions = torch.arange(rows, device=device)
        reason = "its forward pass changes hidden states outside of its layers"
        try:
            with self.run_only(-1, hidden):
                output = self.decoder(inputs_embeds=hidden[None], position_ids=positions[None], plan=None, use_cache=False)
            passed: Tensor = output.last_hidden_state[0]
            if torch.equal(passed, hidden):
                return
        except (TypeError, RuntimeError, KeyError, AttributeError, IndexError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{self.name} cannot be cut into pipeline stages ({reason}); set {KEY}=1")


def _count_stages(layers: int, dims: ParallelDims, name: str) -> int:
    """Return the number of stages. Raises ValueError if the layers do not fit."""
    problems = find_stage_problems(
        "dtensor_cfg",
        name,
        layers,
        ranks=dims.pipeline,
        interleaved=dims.interleaved,
        layers_per_stage=dims.layers_per_stage,
    )
    raise_problems(problems)
    if not dims.interleaved:
        return dims.pipeline
    return 2 * dims.pipeline if dims.layers_per_stage is None else layers // dims.layers_per_stage

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
from strop.learner.parallel.rank_zero_loading import non_parameter_tensors
from strop.models.network import Network
from strop.problems import raise_problems

KEY = "dtensor_cfg.pipeline_parallel_size"
SCALE = "embedding_multiplier"  # of Granite and its relatives, also of inputs that are embedded already


class PassedLayer(nn.Module):
    """Replaces a decoder layer or norm that another stage runs: returns its input, as the first of two results if ``as_tuple``."""

    def __init__(self, layer: nn.Module, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        # Decoders read attributes of their layers, such as the attention type, to choose the arguments they pass to them.
        vars(self).update({name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)})

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Any]:
        if any(isinstance(each, Tensor) and each.shape == hidden_states.shape for each in (*args, *kwargs.values())):
            raise ValueError("its layers read the embedded tokens too")  # Zamba
        if hidden_states.dim() > 3:  # hyper-connections, which begin with copies of the embedded tokens
            raise ValueError("its layers pass on several streams of hidden states")
        if "prev_topk_indices" in kwargs:  # layers that share the choice of an indexer return it with their output
            return hidden_states, kwargs["prev_topk_indices"]
        return (hidden_states, None) if self.as_tuple else hidden_states


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
        if shared := [name for name, module in decoder.named_modules() if getattr(module, "is_kv_shared_layer", False)]:
            raise ValueError(
                f"{shared[0]} of {self.name} attends to the keys and values of an earlier layer, which may be on another pipeline stage; "
                f"set {KEY}=1"
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
        self._layers_return_tuples = False
        self._check_passing()

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
        layers: list[tuple[Any, str]] = [
            (self.layers, str(index)) for index in range(len(self.layers)) if self.stage_of_layer(index) != stage
        ]
        replaced = layers + ([(self.decoder, self._norms[0])] if stage < self.count - 1 else [])
        modules = [parent._modules[name] for parent, name in replaced]
        for (parent, name), module in zip(replaced, modules, strict=True):
            parent._modules[name] = PassedLayer(module, as_tuple=parent is self.layers and self._layers_return_tuples)
        scale = vars(self.decoder).get(SCALE)
        if scale is not None and received is not None:
            setattr(self.decoder, SCALE, 1.0)
        self.network.received = received
        try:
            yield
        finally:
            self.network.received = None
            if scale is not None:
                setattr(self.decoder, SCALE, scale)
            for (parent, name), module in zip(replaced, modules, strict=True):
                parent._modules[name] = module

    def _check_passing(self) -> None:
        """Find what the layers return. Raises ValueError for a decoder that changes hidden states between stages, such as by adding
        positions.
        """
        reasons = []
        for self._layers_return_tuples in (False, True):
            if (reason := self._find_change()) is None:
                return
            reasons.append(reason)
        raise ValueError(f"{self.name} cannot be cut into pipeline stages ({reasons[0]}); set {KEY}=1")

    @torch.no_grad()
    def _find_change(self) -> str | None:
        """Run the decoder without layers, on the CPU if it has no values; their absence changes only what layers are passed."""
        meta = self.embedding.weight.is_meta
        device = torch.device("cpu") if meta else self.embedding.weight.device
        places = [place for place in non_parameter_tensors(self.decoder) if meta and place[2].is_meta]
        hidden = torch.linspace(-1, 1, 4 * self.embedding.weight.shape[1], device=device).view(4, -1)
        for holder, key, tensor in places:
            holder[key] = torch.full_like(tensor, 0.5, device=device)
        try:
            with self.run_only(-1, hidden):
                positions = torch.arange(4, device=device)
                output = self.decoder(inputs_embeds=hidden[None], position_ids=positions[None], plan=None, use_cache=False)
            same = torch.equal(output.last_hidden_state[0], hidden)
            return None if same else "its forward pass changes hidden states outside of its layers"
        except (TypeError, RuntimeError, KeyError, AttributeError, IndexError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for holder, key, tensor in places:
                holder[key] = tensor


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

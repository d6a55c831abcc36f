"""The passes of a network in one order of additions: what ``strop.models.network_parts`` asks for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.extensions.labs.exact.exact_attention import KEY_BLOCK, ExactTree, attend_cached
from strop.extensions.labs.exact.row_products import NotExactError, PackedWeights, apply_whole_vectors, exact_linear
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.loading import is_vision_config
from strop.models.logprobs.lm_head import LMHead
from strop.models.mixers.mixer_interface import is_planned
from strop.models.network import Network
from strop.sampling import Sampling, filtered_logits

_active = threading.local()

_NAMES = ("sigmoid", "rsqrt", "tanh", "exp", "cos", "sin", "log", "erf", "pow", "sqrt", "log1p", "expm1", "reciprocal")
ELEMENTWISE: frozenset[Any] = frozenset(
    {
        *(getattr(torch, name) for name in _NAMES),
        *(getattr(Tensor, name) for name in _NAMES),
        *(F.silu, F.gelu, F.mish, F.hardswish, F.hardsigmoid, F.softplus, F.elu, F.selu, F.celu, F.sigmoid, F.tanh, F.logsigmoid),
        *(torch.float_power, Tensor.__pow__, torch.sinh, torch.cosh),
    }
)
MATMULS: frozenset[Any] = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm})
REFUSED: frozenset[Any] = frozenset(
    {
        *(torch.einsum, torch.baddbmm, Tensor.baddbmm, torch.addbmm, Tensor.addmm, torch.mv, Tensor.mv, torch.dot),
        *(F.scaled_dot_product_attention, F.bilinear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
        *(getattr(F, "grouped_mm", torch.einsum), getattr(torch, "_grouped_mm", torch.einsum)),
    }
)
SENSITIVE = ELEMENTWISE | MATMULS | REFUSED | {F.linear, torch.addmm}


class ExactMode(TorchFunctionMode):
    """Exchanges sensitive functions. Entered again inside itself, it has no effect."""

    def __init__(self, weights: PackedWeights) -> None:
        super().__init__()
        self.weights = weights
        self.outer = False

    def __enter__(self) -> Any:
        self.outer = getattr(_active, "on", False)
        _active.on = True
        return self if self.outer else super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.on = self.outer
        if not self.outer:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func not in SENSITIVE:
            return func(*args, **options)
        if func in ELEMENTWISE:
            return _apply_elementwise(func, args, options)
        if func is F.linear:
            return self._linear(*args, **options)
        if func is torch.addmm:
            return self._addmm(*args, **options)
        if func in MATMULS:
            return self._matmul(func, *args)
        raise _refuse(func)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return exact_linear(input, weight, bias, self.weights)

    def _addmm(self, bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return exact_linear(rows, weight.t(), bias, self.weights)

    def _matmul(self, func: Any, left: Tensor, right: Tensor) -> Tensor:
        if left.shape[-1] == 1:  # one product, nothing is added
            return left * right
        if right.dim() == 2:
            return exact_linear(left, right.t(), None, self.weights)
        raise _refuse(func)


def _apply_elementwise(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if "input" in options:
        args = (options.pop("input"), *args)
    values, rest = args[0], args[1:]
    options.pop("inplace", None)
    if not isinstance(values, Tensor) or any(isinstance(part, Tensor) for part in rest) or options.get("out") is not None:
        return func(*args, **options)
    return apply_whole_vectors(lambda part: func(part, *rest, **options), values)


def _refuse(func: Any) -> NotExactError:
    name = getattr(func, "__name__", str(func))
    return NotExactError(f"it calls torch's {name}, for which there is no way of computing that is the same at every shape")


# Find the modules of a model whose bits would depend on the shape of a pass, and make their forward pass exact, in place.

_WEIGHTS = "exact_weights"  # attributes of an exact module
_ORDINARY = "ordinary_forward"  # where its forward pass had been replaced before


def make_exact(decoder: Any, vocabulary: int) -> PackedWeights:
    """Make a decoder's modules exact and return the copies of weights that they read. Raises NotExactError, with the decoder as before."""
    weights = PackedWeights()
    if hasattr(decoder, "set_experts_implementation"):
        decoder.set_experts_implementation("eager")  # one product for each expert; the grouped ones have no fixed shape
    tokens = torch.arange(24, device=next(decoder.parameters()).device) * 7919 % vocabulary
    sensitive = _find_sensitive(decoder, tokens)
    try:
        for module in sensitive:
            _make_module_exact(module, weights)
        _check_rows(decoder, tokens)
    except NotExactError as error:
        restore_modules(decoder)
        raise NotExactError(
            f"policy.exact_on_policy: {type(decoder).__name__} cannot be exact: {error}; set it to false"
        ) from error
    return weights


def restore_modules(model: nn.Module) -> None:
    """Undo ``make_exact``, also in a copy of the model."""
    for module in model.modules():
        if _WEIGHTS in module.__dict__:
            del module.__dict__[_WEIGHTS], module.__dict__["forward"]
            if _ORDINARY in module.__dict__:
                module.__dict__["forward"] = module.__dict__.pop(_ORDINARY)


def _make_module_exact(module: Any, weights: PackedWeights) -> None:
    replaced = module.__dict__.get("forward")
    if replaced is not None:
        module.__dict__[_ORDINARY] = replaced
    module.__dict__[_WEIGHTS] = weights
    plain = type(module) is nn.Linear and replaced is None
    module.forward = MethodType(_linear_forward if plain else _exact_forward, module)


def _linear_forward(module: Any, inputs: Tensor) -> Tensor:
    return exact_linear(inputs, module.weight, module.bias, module.exact_weights)


def _exact_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    with ExactMode(module.exact_weights):
        replaced = module.__dict__.get(_ORDINARY)
        return type(module).forward(module, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)


class _PassValues:
    """An attention plan that computes nothing."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


@torch.no_grad()
def _find_sensitive(decoder: nn.Module, tokens: Tensor) -> list[nn.Module]:
    """Return the innermost modules that call a function whose bits depend on its shape."""
    running: list[nn.Module] = []
    found: dict[nn.Module, None] = {}

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func in SENSITIVE and running:
                found[running[-1]] = None
            return func(*args, **(kwargs or {}))

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with Watch():
            _read(decoder, tokens, torch.arange(len(tokens)), _PassValues())
    finally:
        for hook in hooks:
            hook.remove()
    return list(found)


def _read(decoder: Any, tokens: Tensor, positions: Tensor, plan: Any) -> Tensor:
    output = decoder(input_ids=tokens[None], position_ids=positions[None].to(tokens.device), plan=plan, use_cache=False)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _make_rows(lengths: Sequence[int], tokens: Tensor) -> ExactTree:
    """Return the plan of a row of sequences without a common prefix."""
    column = torch.tensor(lengths)
    return ExactTree(column.cumsum(0) - column, column, torch.full_like(column, -1), tokens.device)


@torch.no_grad()
def _check_rows(decoder: nn.Module, tokens: Tensor) -> None:
    """Compare a row of one sequence with a row of several. Raises NotExactError if the bits differ."""
    lengths = [len(tokens), 5, 1, 13]
    row = torch.cat([tokens[:length] for length in lengths])
    positions = torch.cat([torch.arange(length) for length in lengths])
    together = _read(decoder, row, positions, _make_rows(lengths, tokens)).split(lengths)
    for length, several in zip(lengths, together, strict=True):
        alone = _read(decoder, tokens[:length], torch.arange(length), _make_rows([length], tokens))
        if not torch.equal(alone, several):
            raise NotExactError(
                f"a sequence of {length} tokens has other hidden states alone than among others (by "
                f"{(alone - several).abs().max().item():.2g})"
            )


log = logging.getLogger(__name__)


class ExactPasses:
    """The exact forward passes of one model, whose modules are changed in place."""

    key_block = KEY_BLOCK

    def __init__(self, model: Any) -> None:
        """Raises NotExactError for a model with operations that have no exact form."""
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.weights: PackedWeights = make_exact(model.get_decoder(), vocabulary)
        self.forget_weights()  # they are loaded, or restored, after this
        log.info("exact_on_policy: learner and engine compute with products, attention and functions of fixed order")

    def plan_tree(self, start: Tensor, length: Tensor, parent: Tensor, device: torch.device) -> ExactTree:
        return ExactTree(start, length, parent, device)

    def attend_cached(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
        return attend_cached(query, key, value, positions, spec)

    def compute_logits(self, hidden: Tensor, head: LMHead) -> Tensor:
        logits = exact_linear(hidden, head.weight, head.bias, self.weights)
        with ExactMode(self.weights):
            return head.transform_logits(logits)

    def token_logprobs(
        self,
        hidden: Tensor,
        target: Tensor,
        head: LMHead,
        sampling: Sampling,
        chunk: int,
        candidates: Tensor | None = None,
        *,
        squared_probs: bool = False,
    ) -> TokenOutputs:
        """hidden [N, H], target [N] -> log-probabilities and entropies [N] under the sampling distribution, at least float32.

        ``candidates`` [N, K]: further ids to return log-probabilities of. ``squared_probs``: also the log of the sum of p^2. The
        backward pass computes the logits of ``chunk`` rows again.
        """

        def compute(rows: Tensor, tokens: Tensor, others: Tensor | None) -> tuple[Tensor, ...]:
            scaled = filtered_logits(self.compute_logits(rows, head), sampling, tokens)
            outputs = [*self.sampled_logprobs(scaled, tokens)]
            if others is not None or squared_probs:
                logs = scaled.log_softmax(-1)
                outputs += [] if others is None else [logs.gather(1, others)]
                outputs += [(2 * logs.detach()).logsumexp(-1)] if squared_probs else []
            return tuple(outputs)

        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, max(len(hidden), 1), chunk):
            rows, tokens = hidden[start : start + chunk], target[start : start + chunk]
            others = None if candidates is None else candidates[start : start + chunk]
            parts.append(_maybe_checkpoint(compute, rows, tokens, others))
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        squares = columns.pop() if squared_probs else None
        return replace(TokenOutputs(*columns), log_sum_sq_probs=squares)

    def sampled_logprobs(self, scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logs = scaled.log_softmax(-1)
        terms = logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)
        terms = torch.cat([terms, terms]) if len(terms) == 1 else terms  # the sum of a single long row is shared by the threads
        return logs.gather(1, tokens[:, None]).squeeze(1), -terms.sum(-1)[: len(logs)]

    def forget_weights(self) -> None:
        self.weights.clear()

    def find_stale(self, weight: Tensor) -> Tensor | None:
        return self.weights.find_stale(weight)

    def restore_modules(self, model: Any) -> None:
        restore_modules(model)


def make_network_exact(network: Network) -> None:
    """From now on, compute the same bits for a token regardless of its neighbours. Raises NotExactError for an unsupported model."""
    check_layers(network)
    network.exact = ExactPasses(network.model)


def check_layers(network: Network) -> None:
    """Raises NotExactError for a model whose layers have no fixed order of additions."""
    if is_vision_config(network.model.config):
        raise NotExactError(
            f"policy.exact_on_policy: {type(network.model).__name__} has a vision tower, which exact mode does not support; set it to "
            "false"
        )
    if not network.packed:
        raise NotExactError(
            f"policy.exact_on_policy: {type(network.model).__name__} cannot read packed rows "
            f"({network.fallback or 'sequence packing is off'}), and padded rows have no fixed order of additions; set it to false"
        )
    sparse = any(is_planned(module) for module in network.model.modules())
    if network.recurrent or sparse:
        layers = "sparse attention" if sparse else "recurrent layers"
        raise NotExactError(
            f"policy.exact_on_policy: {type(network.model).__name__} has {layers}, without a fixed order of additions; set it to false"
        )


def _maybe_checkpoint(compute: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return compute(*inputs)
    outputs: tuple[Tensor, ...] = checkpoint(compute, *inputs, use_reentrant=False)
    return outputs

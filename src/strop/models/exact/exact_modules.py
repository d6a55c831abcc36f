"""Find the modules of a model whose bits would depend on the shape of a pass, and make their forward pass exact, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.exact.exact_mode import SENSITIVE, ExactMode
from strop.models.exact.exact_tree import ExactTree
from strop.models.exact.exactness_error import NotExactError
from strop.models.exact.packed_weights import PackedWeights
from strop.models.exact.row_products import exact_linear

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

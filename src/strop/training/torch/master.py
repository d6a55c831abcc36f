"""bfloat16 weights with float32 masters: no cast in each forward pass, and no update that is rounded away.

A bfloat16 number has 8 bits of precision: at a weight of 1 the next one is 0.008 away, and an update of a learning rate of 1e-6 is
lost. So the optimizer steps a float32 copy of each weight, its master, and the module's weight is the master rounded (arXiv
1710.03740).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class MasterWeights:
    """What the optimizer steps, in place of a module's parameters: float32 copies of those of lower precision, the others themselves.

    A gradient moves from the module's parameter to its master as soon as a backward pass has finished it, and is summed there in
    float32: micro-batches add up without rounding, the low-precision gradients take no memory beyond a layer, and clipping,
    counting and stepping read the masters' gradients. With float32 parameters nothing is copied and nothing changes.

    One at a time on the same module; its hooks go when it goes.
    """

    def __init__(self, named_parameters: NamedParameters) -> None:
        self.named: list[tuple[str, nn.Parameter]] = []
        self._rounded: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}  # name -> master, the module's parameter
        hooks = []
        for name, parameter in named_parameters:
            if not _is_low(parameter.dtype):
                self.named.append((name, parameter))
                continue
            master = nn.Parameter(parameter.detach().float())
            self.named.append((name, master))
            self._rounded[name] = (master, parameter)
            hooks.append(parameter.register_post_accumulate_grad_hook(_move_gradient_to(master)))
        weakref.finalize(self, _remove, hooks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the module, in place. To be called after each optimizer step."""
        if self._rounded:
            masters, rounded = zip(*self._rounded.values(), strict=True)
            torch._foreach_copy_(rounded, masters)

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by name; those that are the module's own parameters are saved with the module."""
        return {name: master.detach() for name, (master, _) in self._rounded.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the masters, and with them the module's weights. Raises ValueError for those of another run's parameters."""
        if state.keys() != self._rounded.keys():
            odd = sorted(state.keys() ^ self._rounded.keys())
            raise ValueError(
                f"the checkpoint has float32 masters of {len(state)} weights, and this run keeps {len(self._rounded)}, which differ "
                f"in {', '.join(odd[:3])}; set policy.weights_dtype as it was when the checkpoint was saved"
            )
        for name, (master, _) in self._rounded.items():
            master.copy_(state[name])
        self.write_back()


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a module's parameters to ``dtype``, in place.

    Buffers keep their precision, as rotary frequencies must, and so do parameters that the model's class wants in float32.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        if parameter.grad is None:
            raise RuntimeError(
                "two learners hold master weights of the same parameters; let go of the first before making another"
            )
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()

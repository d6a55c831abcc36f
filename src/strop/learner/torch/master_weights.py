"""bfloat16 weights with float32 master weights: no cast in each forward pass, and no update lost to rounding.

A bfloat16 number has 8 bits of precision: near 1 the spacing is 0.008, and an update at a learning rate of 1e-6 is lost. So the
optimizer steps a float32 copy of each weight, its master, and the module's weight is the rounded master (arXiv 1710.03740).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class MasterWeights:
    """The parameters updated by the optimizer: float32 copies of a module's low-precision parameters, and its other parameters.

    A hook moves each gradient from the module's parameter to its master as soon as the backward pass has computed it, and accumulates it
    there in float32. Micro-batches add up without rounding, low-precision gradients take the memory of one layer only, and clipping and
    stepping use the masters' gradients. Float32 parameters are not copied.

    A module can have only one instance at a time; its hooks are removed when it is garbage-collected.
    """

    def __init__(self, named_parameters: NamedParameters) -> None:
        self.named_parameters: list[tuple[str, nn.Parameter]] = []
        self._low_precision: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}  # name -> master, the module's parameter
        hooks = []
        for name, parameter in named_parameters:
            if parameter.dtype not in (torch.bfloat16, torch.float16):
                self.named_parameters.append((name, parameter))
                continue
            master = nn.Parameter(parameter.detach().float())
            self.named_parameters.append((name, master))
            self._low_precision[name] = (master, parameter)
            hooks.append(parameter.register_post_accumulate_grad_hook(_make_gradient_hook(master)))
        weakref.finalize(self, _remove_hooks, hooks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters]

    @property
    def copies(self) -> list[nn.Parameter]:
        """The float32 copies, without the module's own parameters."""
        return [master for master, _ in self._low_precision.values()]

    def release(self) -> None:
        """Free the float32 copies of a learner that will only evaluate from now on."""
        for master in self.copies:
            master.data = master.new_empty(0)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters, rounded, into the module in place. Call it after each optimizer step."""
        if self._low_precision:
            masters, rounded = zip(*self._low_precision.values(), strict=True)
            torch._foreach_copy_(rounded, masters)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the float32 copies by name; the module's own parameters are saved with the module."""
        return {name: master.detach() for name, (master, _) in self._low_precision.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the masters and the module's weights. Raises ValueError for masters of other parameters."""
        if state.keys() != self._low_precision.keys():
            differing = sorted(state.keys() ^ self._low_precision.keys())
            raise ValueError(
                f"the checkpoint has float32 masters of {len(state)} weights and this run keeps {len(self._low_precision)}; they differ "
                f"in {', '.join(differing[:3])}; set policy.weights_dtype as it was when the checkpoint was saved"
            )
        for name, (master, _) in self._low_precision.items():
            master.copy_(state[name])
        self.write_back()


def _make_gradient_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        if parameter.grad is None:
            raise RuntimeError(
                "two learners have master weights of the same parameters; delete the first before creating another"
            )
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move


def _remove_hooks(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()

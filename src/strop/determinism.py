"""``policy.deterministic``: makes two equal runs bit-identical on a GPU too, where kernels otherwise add in order of arrival.

The settings are environment variables, because CUDA libraries read them at startup; child processes inherit them and Ray actors
receive them. Read in their sources, not run: torch's flash attention adds the gradient of queries by atomics unless deterministic
algorithms are on and do not only warn; cuBLAS divides a product otherwise if its workspace differs; NCCL adds in the order of
arrival where the switch adds (NVLS); Transformer Engine refuses kernels that are not deterministic.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "STROP_DETERMINISTIC"
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    VARIABLE: "1",
}


def set_deterministic(enabled: bool) -> None:
    """Configure this process and its children. Raises ValueError if CUDA was already initialised here with other settings."""
    if not enabled:
        if os.environ.get(VARIABLE):
            for name in ENVIRONMENT:
                os.environ.pop(name, None)
            follow_environment()
        return
    import torch

    if torch.cuda.is_initialized() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"]:
        raise ValueError(
            "policy.deterministic is true, but this process has used the GPU before, and cuBLAS reads CUBLAS_WORKSPACE_CONFIG only then; "
            f"set it to {ENVIRONMENT['CUBLAS_WORKSPACE_CONFIG']} before the first use of the GPU, or start the run in a separate process"
        )
    os.environ.update(ENVIRONMENT)
    follow_environment()


def deterministic_variables() -> dict[str, str]:
    """Return the environment variables for processes of the run that do not inherit this one's; empty without
    ``policy.deterministic``.
    """
    return dict(ENVIRONMENT) if os.environ.get(VARIABLE) else {}


def follow_environment() -> None:
    """Configure torch in this process from its environment variables. Call it in every process that computes with a model."""
    import torch

    enabled = bool(os.environ.get(VARIABLE))
    if enabled != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(enabled)  # flash attention ignores a mode that only warns
        options: Any = torch.utils.deterministic
        options.fill_uninitialized_memory = not enabled  # filling takes a pass over all new memory


def running_sums(values: Tensor) -> Tensor:
    """Return ``values.cumsum(-1)``, which torch refuses on a GPU in deterministic mode.

    On a GPU, only the sum of a single row varies in its order; several rows are added by kernels with a fixed order.
    """
    import torch

    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    torch.use_deterministic_algorithms(False)
    try:
        if values.numel() > values.shape[-1]:
            return values.cumsum(-1)
        return torch.stack((values, values)).cumsum(-1)[0]
    finally:
        torch.use_deterministic_algorithms(True)

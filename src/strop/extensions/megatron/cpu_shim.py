"""Megatron Core on a CPU: it asks for CUDA devices, streams and generators by name, and gets the CPU's.

Only for machines without a GPU: everything is slower, nothing else differs. The code of Megatron Core is not changed; what it calls in
``torch.cuda`` is replaced in this process, and tensors that it creates on "cuda" are created on the CPU. Tested with 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def prepare_megatron(device: str) -> None:
    """Make Megatron Core usable in this thread. Call it before its first import, in every thread that computes with it.

    Does nothing on a GPU. Raises ModuleNotFoundError without Megatron Core.
    """
    for message in (
        ".*(Apex|Transformer Engine|absl.logging).*",
        "`torch.distributed.*is deprecated",
        "full scope is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)  # of Megatron Core's own calls and defaults
    if torch.device(device).type != "cpu":
        return
    if torch.cuda.is_available():
        raise RuntimeError("Megatron Core was asked to run on the CPU of a machine with a GPU: set policy.device=cuda")
    _replace_cuda()
    if not any(isinstance(mode, CpuMode) for mode in torch.overrides._get_current_function_mode_stack()):
        mode: Any = CpuMode()
        mode.__enter__()


class CpuMode(TorchFunctionMode):
    """Creates on the CPU what is asked for on a GPU. Of one thread.

    ``Tensor.type()`` says ``torch.cuda.FloatTensor``, because Megatron Core's optimizers compare that text.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func not in _REPLACED:  # nearly every call
            return func(*args)
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], torch.dtype | Tensor):
            args = (args[0], _to_cpu(args[1]), *args[2:])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_REPLACED = frozenset({Tensor.cuda, Tensor.pin_memory, Tensor.record_stream, Tensor.to, Tensor.type})


def _to_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device: an index, a name or a ``torch.device``."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


class CpuStream:
    """Stands for a CUDA stream: everything has run when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> CpuEvent:
        return CpuEvent()

    def query(self) -> bool:
        return True


class CpuEvent:
    """Stands for a CUDA event, which has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _CpuGenerators:
    """``torch.cuda.default_generators``: every device has the CPU's."""

    def __getitem__(self, device: int) -> torch.Generator:
        return torch.default_generator


@contextlib.contextmanager
def _no_stream(stream: Any = None) -> Iterator[None]:
    yield


def _constant(value: Any) -> Callable[..., Any]:
    """Return a separate function for each name: torch.compile tells the functions of ``torch.cuda`` apart by identity."""
    return lambda *args, **kwargs: value


@cache
def _replace_cuda() -> None:
    """Replace what Megatron Core calls in ``torch.cuda``, once in a process."""
    cuda: Any = torch.cuda
    stream = CpuStream()
    replaced: dict[str, Any] = {
        "current_device": _constant(CPU),
        "current_stream": _constant(stream),
        "default_stream": _constant(stream),
        "stream": _no_stream,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "default_generators": _CpuGenerators(),
        "mem_get_info": _constant((1 << 34, 1 << 34)),
        "_lazy_call": lambda function, **kwargs: function(),
        **{name: _constant(None) for name in ("set_device", "synchronize", "empty_cache", "_lazy_init")},
        **{name: _constant(0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _constant(None), _constant(None)
    _replace_references(cuda)


def _replace_references(cuda: Any) -> None:
    """Replace what modules of Megatron Core have taken from ``torch.cuda`` when they were imported."""
    _import_without_compiler()
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    random._lazy_call, random._lazy_init = cuda._lazy_call, cuda._lazy_init
    random.device_ctx_manager = _no_stream
    mappings._gather_along_first_dim = partial(_gather_rows, mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = partial(_reduce_scatter_rows, mappings._reduce_scatter_along_first_dim)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1: a NameError in the router without Transformer Engine
    if hasattr(token_dispatcher, "maybe_move_tensor_to_cpu"):
        token_dispatcher.maybe_move_tensor_to_cpu = _read_sizes


def _import_without_compiler() -> None:
    """Import Megatron Core without torch.compile, which asks for the properties of a CUDA device: it compiles what it defines."""
    torch_module: Any = torch
    compiler = torch_module.compile
    torch_module.compile = lambda function: function
    try:
        import megatron.core  # noqa: F401
    finally:
        torch_module.compile = compiler


def _gather_rows(
    gather: Callable[..., Tensor], rows: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> Tensor:
    """Gather rows of which ranks have different numbers: gloo takes equal ones."""
    if output_split_sizes is None:
        return gather(rows, group, output_split_sizes, use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def _reduce_scatter_rows(
    scatter: Callable[..., Tensor], rows: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Tensor:
    """Add the rows of all ranks; return this rank's, of which ranks get different numbers."""
    if input_split_sizes is None:
        return scatter(rows, group, input_split_sizes, use_global_buffer)
    total = rows.contiguous().clone()
    torch.distributed.all_reduce(total, group=group)
    mine: Tensor = total.split([int(size) for size in input_split_sizes])[group.rank()]
    return mine.clone()


def _read_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the sizes of an exchange as numbers: gloo takes lists of them, and Megatron Core leaves a CPU's tensors as they are."""
    return tensor.cpu().numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

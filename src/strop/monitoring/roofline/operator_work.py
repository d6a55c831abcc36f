"""What a call of an operator has to do: FLOPs, and bytes that are read and written, from the shapes of its inputs.

A multiply-add is 2 FLOPs. Bytes are those of inputs and outputs, each once: what a kernel reads twice, or finds in a cache, is not known.
Arithmetic that is not a product is counted by convention: 1 FLOP for each number of an elementwise operator or a reduction, a few for
softmax, norms and optimizers. An operator without a rule here has no work; its time counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strop.hardware.flops import causal_pairs
from strop.monitoring.roofline.operator_event import OperatorInputs, TensorShape

PRODUCTS, ATTENTION, SOFTMAX, ELEMENTWISE = "matrix products", "attention", "norms and softmax", "elementwise"
REDUCTIONS, COPIES, OPTIMIZER, CONVOLUTIONS = "reductions", "copies and gathers", "optimizer", "convolutions"
COMMUNICATION, KERNELS, DISPATCH, OUTSIDE = "communication", "native kernels", "views and dispatch", "outside operators"
LOGPROBS = "log-probabilities"


@dataclass(frozen=True)
class OperatorWork:
    """The work of one call."""

    kind: str
    flops: float = 0.0
    moved: float = 0.0  # bytes
    precision: str = ""  # of the arithmetic
    shapes: str = ""  # as a table shows them
    counted: bool = True  # False: only the kind is known


PRODUCT = re.compile(r"\[(\d+), (\d+)\] x \[(\d+), \2\]\^T (bfloat16|float32)")
Rule = Callable[[OperatorInputs], OperatorWork]


def count_work(name: str, inputs: OperatorInputs) -> OperatorWork | None:
    """Return the work of a call; None for an operator that only calls others, or that has no rule."""
    if name.startswith(("c10d::", "gloo:", "nccl:", "record_param_comms")):
        return OperatorWork(COMMUNICATION, counted=False)
    rule = RULES.get(name) or RULES.get(name.rstrip("_"))
    if rule is None:
        return None
    try:
        return rule(inputs)
    except (KeyError, IndexError, ValueError):  # called with other arguments than are known here
        return None


def count_kernel(detail: str) -> OperatorWork:
    """Return the work of one of Strop's own kernels: of a product that says so, "[4, 8] x [16, 8]^T bfloat16"; else its kind."""
    found = PRODUCT.fullmatch(detail)
    if found is None:
        return OperatorWork(KERNELS, counted=False)
    rows, inner, columns = (int(found[place]) for place in (1, 2, 3))
    itemsize = 2 if found[4] == "bfloat16" else 4
    moved = float(itemsize * (rows * inner + inner * columns + rows * columns))
    return OperatorWork(PRODUCTS, 2.0 * rows * inner * columns, moved, found[4], detail.rpartition(" ")[0])


# --- products --------------------------------------------------------------------------------------------------------------


def _product(left: int, right: int) -> Rule:
    """A product of matrices, or of as many pairs of them, that are arguments ``left`` [.., m, k] and ``right`` [.., k, n]."""

    def count(inputs: OperatorInputs) -> OperatorWork:
        a, b = inputs.tensor(left), inputs.tensor(right)
        *batch, rows, inner = a.shape if len(a.shape) > 1 else (1, *a.shape)
        columns = b.shape[-1] if len(b.shape) > 1 else 1
        return _make_product(a, b, math.prod(batch), rows, inner, columns, f"{_text(a)} x {_text(b)}")

    return count


def _linear(inputs: OperatorInputs) -> OperatorWork:
    """A layer: rows [.., k] with weights [n, k]."""
    x, weight = inputs.tensor(0), inputs.tensor(1)
    columns, inner = weight.shape
    return _make_product(x, weight, 1, x.numel // inner, inner, columns, f"{_text(x)} x {_text(weight)}^T")


def _make_product(a: TensorShape, b: TensorShape, batch: int, m: int, k: int, n: int, shapes: str) -> OperatorWork:
    flops, out = 2.0 * batch * m * k * n, batch * m * n * a.itemsize
    return OperatorWork(PRODUCTS, flops, a.size + b.size + out, a.precision, shapes)


def _convolution(inputs: OperatorInputs) -> OperatorWork:
    x, weight = inputs.tensor(0), inputs.tensor(1)
    strides, paddings, dilations = (_integers(inputs.text(place)) for place in (3, 4, 5))
    spread = [_each(values, len(x.shape) - 2) for values in (strides, paddings, dilations)]
    out = x.shape[0] * weight.shape[0]
    for size, kernel, step, padding, dilation in zip(x.shape[2:], weight.shape[2:], *spread, strict=True):
        out *= (size + 2 * padding - dilation * (kernel - 1) - 1) // step + 1
    flops = 2.0 * out * weight.numel / weight.shape[0]
    moved = x.size + weight.size + out * x.itemsize
    return OperatorWork(CONVOLUTIONS, flops, moved, x.precision, f"{_text(x)} * {_text(weight)}")


def _convolution_backward(inputs: OperatorInputs) -> OperatorWork:
    gradient, x, weight = (inputs.tensor(place) for place in range(3))
    flops = 4.0 * gradient.numel * weight.numel / weight.shape[0]
    moved = gradient.size + 2.0 * (x.size + weight.size)
    return OperatorWork(CONVOLUTIONS, flops, moved, x.precision, f"{_text(x)} * {_text(weight)}")


# --- attention -------------------------------------------------------------------------------------------------------------


def _attention(first: int, causal: int, *, backward: bool = False) -> Rule:
    """Attention whose query [B, H, L, D], key and value are arguments from ``first`` on; ``causal`` is the place of that flag.

    A kernel with a mask computes all pairs. Backward: five products, one of which computes the scores again.
    """

    def count(inputs: OperatorInputs) -> OperatorWork:
        query, key, value = (inputs.tensor(first + place) for place in range(3))
        batch, heads, length, width = query.shape
        others = key.shape[2]
        pairs = causal_pairs(length) if inputs.text(causal) == "True" and length <= others else length * others
        widths = 3 * width + 2 * value.shape[3] if backward else width + value.shape[3]
        flops = 2.0 * batch * heads * pairs * widths
        out = batch * heads * length * value.shape[3] * query.itemsize
        mask = sum(each.size for place, each in inputs.tensors.items() if place > first + 2 and len(each.shape) >= 2)
        both = query.size + key.size + value.size
        moved = 2.0 * (both + out) if backward else both + out + mask
        shapes = f"{_text(query)}, keys {_text(key)}"
        return OperatorWork(ATTENTION, flops, moved, query.precision, shapes)

    return count


# --- everything else -------------------------------------------------------------------------------------------------------


def _elementwise(kind: str = ELEMENTWISE, flops: float = 1.0, itemsize: int | None = None) -> Rule:
    """Numbers from numbers at the same place; ``itemsize``: bytes of one that is written, where it is not that of the inputs."""

    def count(inputs: OperatorInputs) -> OperatorWork:
        found = inputs.every
        shape = _broadcast([each.shape for each in found])
        widest = max((each for each in found if each.shape), key=lambda each: each.itemsize, default=found[0])
        moved = sum(each.size for each in found) + math.prod(shape) * (itemsize or widest.itemsize)
        return OperatorWork(kind, flops * math.prod(shape), moved, widest.precision)

    return count


def _rows(kind: str, flops: float) -> Rule:
    """Softmax, norms and their gradients: an output of the first input's shape."""

    def count(inputs: OperatorInputs) -> OperatorWork:
        first = inputs.tensor(0)
        moved = sum(each.size for each in inputs.every) + first.numel * first.itemsize
        return OperatorWork(kind, flops * first.numel, moved, first.precision)

    return count


def _reduction(flops: float = 1.0) -> Rule:
    def count(inputs: OperatorInputs) -> OperatorWork:
        first = inputs.tensor(0)
        return OperatorWork(REDUCTIONS, flops * first.numel, first.size, first.precision)

    return count


def _copy(inputs: OperatorInputs) -> OperatorWork:
    target, source = inputs.tensor(0), inputs.tensor(1)
    return OperatorWork(COPIES, 0.0, target.size + source.size, target.precision)


def _fill(inputs: OperatorInputs) -> OperatorWork:
    return OperatorWork(COPIES, 0.0, inputs.tensor(0).size, inputs.tensor(0).precision)


def _take_rows(source: int, indices: int, dimension: int | None) -> Rule:
    """Rows that are looked up: each is read and written."""

    def count(inputs: OperatorInputs) -> OperatorWork:
        table, places = inputs.tensor(source), inputs.tensor(indices)
        along = 0 if dimension is None else int(inputs.text(dimension))
        taken = places.numel * table.numel // table.shape[along]
        return OperatorWork(COPIES, 0.0, 2.0 * taken * table.itemsize + places.size, table.precision)

    return count


def _place_numbers(source: int) -> Rule:
    """Numbers that are added to, or written at, places of a larger tensor: read, and there read and written."""

    def count(inputs: OperatorInputs) -> OperatorWork:
        given = inputs.tensor(source)
        return OperatorWork(COPIES, 0.0, 3.0 * given.numel * given.itemsize, given.precision)

    return count


def _gather(inputs: OperatorInputs) -> OperatorWork:
    table, places = inputs.tensor(0), inputs.tensor(2)
    return OperatorWork(COPIES, 0.0, places.size + 2.0 * places.numel * table.itemsize, table.precision)


def _embedding_backward(inputs: OperatorInputs) -> OperatorWork:
    gradient, rows = inputs.tensor(0), int(inputs.text(2))
    table = rows * gradient.shape[-1] * gradient.itemsize
    return OperatorWork(COPIES, float(gradient.numel), table + 3.0 * gradient.numel * gradient.itemsize, gradient.precision)


def _optimizer(flops: float, read: int, written: int) -> Rule:
    """A fused step over lists of parameters, gradients and states: tensors that are read and written, each of a parameter's size."""

    def count(inputs: OperatorInputs) -> OperatorWork:
        numbers = sum(each.numel for each in inputs.lists[0])
        size = inputs.lists[0][0].itemsize
        return OperatorWork(OPTIMIZER, flops * numbers, float(numbers * size * (read + written)), "float32")

    return count


def _only(kind: str) -> Rule:
    return lambda inputs: OperatorWork(kind, counted=False)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    length = max(map(len, shapes))
    columns = zip(*((1,) * (length - len(shape)) + shape for shape in shapes), strict=True)
    return tuple(0 if 0 in column else max(column) for column in columns)


def _text(tensor: TensorShape) -> str:
    return str(list(tensor.shape))


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _each(values: list[int], count: int) -> list[int]:
    return values * count if len(values) == 1 else values


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten::{name}": rule for name in names.split()}


RULES: Mapping[str, Rule] = {
    **_named("mm mv dot _int_mm _scaled_mm", _product(0, 1)),
    **_named("bmm", _product(0, 1)),
    **_named("addmm baddbmm addmv addbmm", _product(1, 2)),
    "mkldnn::_linear_pointwise": _linear,
    "aten::mkldnn_linear": _linear,
    **_named("convolution", _convolution),
    **_named("convolution_backward", _convolution_backward),
    **_named("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention", _attention(0, 4)),
    **_named("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", _attention(0, 6)),
    **_named("_scaled_dot_product_flash_attention_for_cpu_backward", _attention(1, 7, backward=True)),
    **_named("_scaled_dot_product_flash_attention_backward", _attention(1, 11, backward=True)),
    **_named("_scaled_dot_product_efficient_attention_backward", _attention(1, 11, backward=True)),
    **_named("_scaled_dot_product_cudnn_attention_backward", _attention(1, 14, backward=True)),
    **_named(
        "add sub rsub mul div neg exp expm1 log log1p sqrt rsqrt pow square abs sign sin cos tanh sigmoid silu gelu relu reciprocal "
        "clamp clamp_min clamp_max maximum minimum where addcmul addcdiv lerp erf floor round trunc remainder fmod silu_backward "
        "gelu_backward sigmoid_backward tanh_backward threshold_backward native_dropout normal uniform exponential bernoulli "
        "masked_fill bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__",
        _elementwise(),
    ),
    **_named("eq ne gt ge lt le logical_and logical_or logical_not isfinite isnan isinf", _elementwise(itemsize=1)),
    **_named("sum mean amax amin max min argmax argmin prod any all linalg_vector_norm norm", _reduction()),
    **_named("var std var_mean logsumexp", _reduction(4.0)),
    **_named("cumsum cumprod sort topk", _rows(REDUCTIONS, 1.0)),
    **_named("_softmax _log_softmax", _rows(SOFTMAX, 5.0)),
    **_named("_softmax_backward_data _log_softmax_backward_data", _rows(SOFTMAX, 4.0)),
    **_named("native_layer_norm _fused_rms_norm", _rows(SOFTMAX, 6.0)),
    **_named("native_layer_norm_backward _fused_rms_norm_backward", _rows(SOFTMAX, 12.0)),
    **_named("copy", _copy),
    **_named("fill zero", _fill),
    **_named("embedding", _take_rows(0, 1, None)),
    **_named("index_select", _take_rows(0, 2, 1)),
    **_named("gather", _gather),
    **_named("embedding_dense_backward", _embedding_backward),
    **_named("index_add index_copy scatter scatter_add", _place_numbers(3)),
    **_named("index_put _index_put_impl", _place_numbers(2)),
    **_named("index cat roll flip masked_select nonzero repeat_interleave arange", _only(COPIES)),
    **_named("_fused_adamw _fused_adam", _optimizer(14.0, 4, 3)),
    **_named("_fused_sgd _fused_adagrad", _optimizer(5.0, 3, 2)),
}

"""What a GPU computes beside what the CPU computes: losses, gradients, the output layer, engine and learner, offload, NCCL, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from measurement import Reading, Target
from model_shapes import make_batch, make_group
from torch import Tensor

FLOAT64, FLOAT32, BFLOAT16 = 1e-9, 2e-4, 0.15  # other kernels, other orders of addition
BFLOAT16_LAYER = 0.02  # of one layer alone: a bfloat16 number is within 0.004 of what it stands for


def compare(name: str, error: float, bound: float, note: str = "") -> Reading:
    """Return a row that is wrong where the error exceeds its bound."""
    ok = error <= bound
    value = f"{error:.2g} (at most {bound:g})"
    return Reading(
        name=name, value=value if ok else f"failed: {value}", note=note, numbers={"error": error, "bound": bound}, ok=ok
    )


def exact_products() -> None:
    """TensorFloat-32 off, so that float32 means float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def losses_and_gradients(target: Target) -> list[Reading]:
    """GRPO's loss and gradient of a tiny model, in float64 and float32, whole and in small micro-batches."""
    from support.algorithms import grpo

    exact_products()
    algorithm = grpo()
    batch = make_batch(11, (9, 1, 14), 300, algorithm, groups=2)
    wanted_loss, wanted = _gradients("cpu", torch.float64, algorithm, batch, 10**9)
    rows = []
    for dtype, bound in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        for budget in (10**9, 40):
            loss, found = _gradients(target.device, dtype, algorithm, batch, budget)
            name = f"{str(dtype).removeprefix('torch.')}, {'whole' if budget > 1000 else 'in micro-batches'}"
            rows.append(compare(f"loss, {name}", abs(loss - wanted_loss), bound))
            rows.append(compare(f"gradients, {name}, relative", _largest(found, wanted), bound))
    return rows


def _gradients(device: str, dtype: torch.dtype, algorithm: Any, batch: Any, budget: int) -> tuple[float, dict[str, Tensor]]:
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.learners import make_torch_learner
    from support.models import build, to_float64

    model = build("llama")
    model = (to_float64(model) if dtype == torch.float64 else model).to(device)
    learner = make_torch_learner(Network(model, precision=dtype, packed=True), Sampling(temperature=0.9), train_tokens=budget)
    result = learner.forward_backward(batch, algorithm.loss)
    gradients = {name: each.grad.detach().double().cpu() for name, each in model.named_parameters() if each.grad is not None}
    return float(result.metrics["loss"].value), gradients


def _largest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to the largest number in it."""
    if found.keys() != wanted.keys():
        raise ValueError(f"only one of the two has gradients of {sorted(found.keys() ^ wanted.keys())}")
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-12)) for name in wanted)


def output_layer(target: Target) -> list[Reading]:
    """Log-probabilities, entropies and gradients over a vocabulary, by each way to compute them, against float64 on the CPU."""
    from strop.models.logprobs import tiled_logprobs as module

    exact_products()
    rows, words, width = (64, 500, 32) if target.tiny else (512, 50_000, 256)
    operations = type(module.choose_operations(torch.device(target.device), torch.float32)).__name__
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(rows, width, generator=generator), torch.randn(words, width, generator=generator) * 0.1]
    targets = torch.randint(words, (rows,), generator=generator)
    found = []
    for dtype, bound in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16_LAYER)):
        rounded = [leaf.to(dtype) for leaf in leaves]
        wanted = _output_layer([leaf.double() for leaf in rounded], targets)
        own = _output_layer([leaf.to(target.device) for leaf in rounded], targets.to(target.device))
        for name, left, right in zip(
            ("log-probabilities", "entropies", "gradient, hidden", "gradient, weight"), own, wanted, strict=True
        ):
            error = float((left.double().cpu() - right).abs().max() / right.abs().max())
            found.append(
                compare(f"output layer, {name}, {str(dtype).removeprefix('torch.')}, relative", error, bound, operations)
            )
    return found


def _output_layer(leaves: list[Tensor], targets: Tensor) -> list[Tensor]:
    from strop.models.logprobs.tiled_logprobs import tiled_logprobs

    hidden, weight = (leaf.detach().requires_grad_() for leaf in leaves)
    outputs = tiled_logprobs(hidden, targets, weight, None, 0.9, 200)
    gradients = torch.autograd.grad(outputs[0].sum() - 0.1 * outputs[1].sum(), [hidden, weight])
    return [*(output.detach() for output in outputs), *gradients]


def sampler_and_learner(target: Target) -> list[Reading]:
    """Log-probabilities of the embedded engine beside those of the learner, in float32 and bfloat16, with and without CUDA graphs."""
    exact_products()
    rows = []
    for precision, bound in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
        tokens = []
        for graphs in (False, True):
            sampled, error, ratio = _sample_and_score(target, precision, graphs)
            tokens.append(sampled)
            name = f"sampler and learner, {str(precision).removeprefix('torch.')}, CUDA graphs {'on' if graphs else 'off'}"
            note = f"mean of exp(absolute difference) {ratio:.6f}"
            rows.append(compare(name, error, bound, note))
        changed = sum(left != right for left, right in zip(*tokens, strict=True))
        rows.append(compare(f"completions that CUDA graphs change, {str(precision).removeprefix('torch.')}", float(changed), 0.0))
    return rows


def _sample_and_score(target: Target, precision: torch.dtype, graphs: bool) -> tuple[list[list[int]], float, float]:
    from strop.data.packing import pack
    from strop.learner.torch.scorer import NetworkScorer
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.models import build
    from support.torch_engine import Request, make_engine, make_runner, run_requests

    network = Network(build("llama").to(target.device), precision=precision, packed=True)
    sampling = Sampling(max_new_tokens=20, temperature=0.8)
    asked = [Request([5, 40, 200, 31, 7, 7, 90], sampling, seed) for seed in range(6)]
    done = run_requests(make_engine(make_runner(network, cuda_graphs=graphs)), asked)
    batch = pack([make_group(0, torch.tensor(asked[0].prompt), [(each.tokens, each.logprobs) for each in done])])
    with torch.no_grad():
        scores: Any = NetworkScorer(network, sampling, score_tokens=10_000).score(batch)
    difference = (scores.logprobs.cpu() - batch.rollout_logprobs).abs()
    return [each.tokens.tolist() for each in done], float(difference.max()), float(difference.exp().mean())


def offload(target: Target) -> list[Reading]:
    """A learner's model leaves the device and comes back: the same bits, and its memory free meanwhile."""
    from strop.learner.torch.tensor_offload import TensorOffload
    from support.models import build

    model = build("llama").to(target.device)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    held = _allocated(target)
    moving = TensorOffload(lambda: model.parameters(), torch.device(target.device))
    moving.offload()
    left = _allocated(target)
    moving.onload()
    changed = sum(not torch.equal(kept, now.detach().cpu()) for kept, now in zip(before, model.parameters(), strict=True))
    size = sum(parameter.nbytes for parameter in before)
    rows = [compare("tensors that offload changes", float(changed), 0.0)]
    if target.device != "cpu":
        rows.append(compare("bytes of an offloaded model that stay on the GPU", float(max(left - (held - size), 0)), 0.1 * size))
    return rows


def _allocated(target: Target) -> int:
    return 0 if target.device == "cpu" else torch.cuda.memory_allocated()


def collectives(target: Target) -> list[Reading]:
    """NCCL with one rank on one device (gloo on a CPU): sums, gathers and broadcasts change nothing."""
    import tempfile

    dist: Any = torch.distributed
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="strop-gpu-") as folder:
        backend = "gloo" if target.device == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        values = torch.randn(1000, device=target.device)
        gathered = [torch.empty_like(values)]
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(values),
            lambda: dist.broadcast(values, 0),
            lambda: dist.all_gather(gathered, values),
        ]
        before = values.clone()
        for call in calls:
            call()
        wrong = int(not torch.equal(values, before)) + int(not torch.equal(gathered[0], before))
        dist.destroy_process_group()
    return [compare(f"wrong results of {backend} with one rank", float(wrong), 0.0, f"{time.perf_counter() - started:.1f} s")]


def memory(target: Target) -> list[Reading]:
    """Peak memory of the output layer's two passes, beside that of its logits in float32."""
    if target.device == "cpu":
        return [Reading(name="memory of the output layer", value="on a GPU alone")]
    from strop.models.logprobs.tiled_logprobs import tiled_logprobs

    rows, words, width, chunk = 4096, 50_000, 64, 256
    hidden, weight = (torch.randn(count, width, device=target.device, requires_grad=True) for count in (rows, words))
    targets = torch.randint(words, (rows,), device=target.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropies = tiled_logprobs(hidden, targets, weight, None, 0.9, chunk)
    (logprobs.sum() - 0.1 * entropies.sum()).backward()
    grown = torch.cuda.max_memory_allocated() - before
    whole = rows * words * 4
    note = f"{grown / 2**20:.0f} MiB, {chunk} rows at a time"
    return [compare("memory of the output layer, share of all its logits", grown / whole, 0.6, note)]

"""What a GPU says of Strop: its tests for GPUs, then seconds and peak memory of a GRPO step, of its parts, and of tree attention.

    python benchmarks/gpu/first_gpu.py                  # one GPU; needs neither vLLM nor Ray nor a network
    python benchmarks/gpu/first_gpu.py --size 1B --json results.json
    python benchmarks/gpu/first_gpu.py --device cpu --size tiny --skip-tests

The model is made up: a Llama of the chosen size with random weights. Each measurement has a process of its own, so that its peak of memory
is its own. The table is written to be pasted into docs/log.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import torch  # noqa: E402
from common import memory, number, reset_peak_memory, run_in_subprocess, versions  # noqa: E402
from torch import Tensor, nn  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and the batch that it is measured with."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompts: int
    generations: int
    prompt: int  # tokens
    completion: int  # tokens, the longest


SIZES = {
    "tiny": Size(hidden=32, layers=2, heads=4, kv_heads=2, vocabulary=512, prompts=2, generations=2, prompt=6, completion=8),
    "small": Size(
        hidden=1024, layers=24, heads=16, kv_heads=8, vocabulary=32000, prompts=8, generations=8, prompt=256, completion=512
    ),
    "1B": Size(
        hidden=2048, layers=16, heads=32, kv_heads=8, vocabulary=128256, prompts=16, generations=8, prompt=512, completion=1024
    ),
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the table."""

    name: str
    seconds: float  # the median
    peak_memory: float  # MiB: allocated on the GPU, or resident on a CPU
    note: str = ""


@dataclass(frozen=True)
class Settings:
    size: Size
    device: str
    steps: int
    model: str  # folder


# --- measuring -------------------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_memory(device: str) -> float:
    """Return the peak of this process, in MiB."""
    return memory() if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def reset_peak(device: str) -> None:
    if device == "cpu":
        reset_peak_memory()
    else:
        torch.cuda.reset_peak_memory_stats()


def measure(name: str, settings: Settings, run: Callable[[], Any], note: str = "") -> Measurement:
    """Call ``run`` once to warm up, and ``steps`` times that count."""
    run()
    synchronize(settings.device)
    reset_peak(settings.device)
    seconds = []
    for _ in range(settings.steps):
        start = time.perf_counter()
        run()
        synchronize(settings.device)
        seconds.append(time.perf_counter() - start)
    return Measurement(name=name, seconds=median(seconds), peak_memory=peak_memory(settings.device), note=note)


def save_model(size: Size, folder: str) -> str:
    """Save a Llama with random weights and the tests' tokenizer; return how many weights it has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from loop.tiny import tiny_tokenizer

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M weights"


# --- GRPO ------------------------------------------------------------------------------------------------------------------


def alternate(task: Any, rollouts: Sequence[Any]) -> list[float]:
    """A reward that no group has in common: without a difference there is nothing to train on, and no backward pass."""
    return [float(index % 2) for index in range(len(rollouts))]


def measure_grpo(settings: Settings, offload: bool, weights_dtype: str) -> list[Measurement]:
    """A GRPO step of ``strop grpo`` with the torch engine; the first step is not counted."""
    from strop import cli

    size = settings.size
    with tempfile.TemporaryDirectory(prefix="strop-first-gpu-") as folder:
        prompts = Path(folder) / "prompts.jsonl"  # a character is a token
        questions = (f"{number:05}" + "why? " * (size.prompt // 5) for number in range(size.prompts * (settings.steps + 1)))
        prompts.write_text("".join(json.dumps({"input": question}) + "\n" for question in questions))
        overrides = {
            "policy.model_name": settings.model,
            "policy.device": settings.device,
            "policy.precision": "bfloat16",
            "policy.weights_dtype": weights_dtype,
            "policy.offload": str(offload).lower(),
            "policy.max_total_sequence_length": 64 + size.prompt + size.completion,
            "policy.generation.backend": "torch",
            "policy.generation.max_new_tokens": size.completion,
            "grpo.num_prompts_per_step": size.prompts,
            "grpo.num_generations_per_prompt": size.generations,
            "grpo.max_num_steps": settings.steps + 1,
            "grpo.val_period": 0,
            "data.train.dataset_name": str(prompts),
            "data.train.input_key": "input",
            "data.train.env_name": "made_up",
            "env.made_up.reward": f"{Path(__file__).resolve()}:alternate",
            "checkpointing.enabled": "false",
            "logger.log_dir": folder,
            "logger.console": "plain",
        }
        reset_peak(settings.device)
        if cli.main(["grpo", *(f"{key}={value}" for key, value in overrides.items())]):
            raise RuntimeError("the GRPO run failed; its messages are above")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("step", 0) > 1 and "timing/train/total_step_time" in row]

    def seconds(name: str) -> float:
        return median(row.get(f"timing/train/{name}", 0.0) for row in steps)

    parts = ", ".join(f"{name} {number(seconds(name))} s" for name in ("generation", "policy_training", "offload", "weight_sync"))
    rate = number(median(row["performance/tokens_per_sec"] for row in steps))
    name = f"GRPO step, {weights_dtype} weights, offload {'on' if offload else 'off'}"
    note = f"{parts}; {rate} tokens/s"
    return [Measurement(name=name, seconds=seconds("total_step_time"), peak_memory=peak_memory(settings.device), note=note)]


# --- the parts of a step ---------------------------------------------------------------------------------------------------


def measure_learner(settings: Settings) -> list[Measurement]:
    """Log-probabilities, forward and backward, the optimizer, and leaving the device and coming back."""
    from strop.learner.torch.tensor_offload import ModelOffload
    from strop.models.loading import load_model
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.algorithms import grpo
    from support.learners import make_torch_learner
    from support.rollouts import pack_for

    algorithm = grpo()
    batch = pack_for(groups_of(settings.size), algorithm)
    network = Network(load_model(settings.model, device=settings.device), precision=torch.bfloat16)
    learner = make_torch_learner(network, Sampling())
    tokens = f"{len(batch.tokens)} tokens read, {len(batch.target)} predicted"
    offload = ModelOffload([learner.state_offload, learner.weight_offload])

    def train() -> None:
        learner.forward_backward(batch, algorithm.loss)
        learner.step()

    def leave_and_return() -> None:
        offload.offload()
        offload.onload()

    return [
        measure("log-probabilities", settings, lambda: learner.score(batch), tokens),
        measure("forward, backward and AdamW", settings, train, tokens),
        measure("leave the device and come back", settings, leave_and_return, "weights, gradients and AdamW's state"),
    ]


def measure_megatron(settings: Settings) -> list[Measurement]:
    """The same parts with Megatron Core on this GPU; with FP8 too where Transformer Engine is installed."""
    from importlib.util import find_spec

    if find_spec("megatron") is None:
        return []
    import torch.distributed as dist

    from strop.learner.megatron.megatron_config import Fp8Config

    with tempfile.TemporaryDirectory(prefix="strop-first-gpu-") as folder:
        backend = "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        found = _measure_megatron(settings, "bfloat16", Fp8Config())
        if find_spec("transformer_engine") is not None:
            found += _measure_megatron(settings, "FP8", Fp8Config(enabled=True, fp8="hybrid", fp8_recipe="tensorwise"))
        dist.destroy_process_group()
    return found


def _measure_megatron(settings: Settings, name: str, fp8: Any) -> list[Measurement]:
    from dataclasses import replace

    from strop.learner.megatron.cpu_shim import prepare_megatron
    from strop.learner.megatron.megatron_config import MegatronConfig
    from strop.learner.megatron.megatron_optimizer_config import MegatronDdpConfig
    from strop.learner.megatron.model_files import find_model_files
    from strop.sampling import Sampling
    from support.algorithms import grpo
    from support.learners import make_model_config
    from support.rollouts import pack_for

    algorithm = grpo()
    batch = pack_for(groups_of(settings.size), algorithm)
    ddp = MegatronDdpConfig(overlap_grad_reduce=False, overlap_param_gather=False)
    section = MegatronConfig(enabled=True, fp8_cfg=fp8, distributed_data_parallel_config=ddp)
    files = find_model_files(settings.model, {})
    prepare_megatron(settings.device)
    from strop.learner.megatron.megatron_learner import MegatronLearner
    from strop.learner.megatron.network_loader import NetworkLoader

    loader = NetworkLoader(settings.device, 1)
    layout = loader.make_layout(section, files, "policy.megatron_cfg")
    network = loader.load(files, section, layout, dtype=torch.bfloat16, chunk=1024)
    learner = MegatronLearner(network, replace(make_model_config(), megatron_cfg=section), Sampling())
    tokens = f"{len(batch.tokens)} tokens read, {len(batch.target)} predicted"

    def train() -> None:
        learner.forward_backward_local(batch, algorithm.loss)
        learner.step()

    return [
        measure(f"Megatron Core, {name}: log-probabilities", settings, lambda: learner.score_local(batch), tokens),
        measure(f"Megatron Core, {name}: forward, backward and Adam", settings, train, tokens),
    ]


def groups_of(size: Size) -> Any:
    """Return made-up groups: completions of one half to the whole of the longest."""
    from support.rollouts import simple_groups

    lengths = [size.completion - index * size.completion // (2 * size.generations) for index in range(size.generations)]
    return simple_groups(*[(size.prompt, tuple(lengths))] * size.prompts)


def measure_attention(settings: Settings) -> list[Measurement]:
    """One layer's attention, forward and backward: packed rows with shared prompts, and padded rows as other trainers read them."""
    from strop.models.attention.attention_plan import AttentionSpec
    from strop.models.attention.tree_plan import TreePlan
    from support.algorithms import grpo
    from support.rollouts import pack_for

    size = settings.size
    batch = pack_for(groups_of(size), grpo())
    dtype = torch.float32 if settings.device == "cpu" else torch.bfloat16
    width = size.hidden // size.heads
    plan = TreePlan(batch.segment_start, batch.segment_length, batch.segment_parent, torch.device(settings.device))
    spec = AttentionSpec(0, width**-0.5)
    rows, length = size.prompts * size.generations, size.prompt + size.completion

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=settings.device, requires_grad=True)

    flat = [rand(len(batch.tokens), heads, width) for heads in (size.heads, size.kv_heads, size.kv_heads)]
    padded = [rand(rows, heads, length, width) for heads in (size.heads, size.kv_heads, size.kv_heads)]
    padded_attention = partial(nn.functional.scaled_dot_product_attention, *padded, is_causal=True, enable_gqa=True)
    return [
        measure(
            "tree attention, one layer",
            settings,
            lambda: plan.attend(*flat, spec).sum().backward(),
            f"{len(batch.tokens)} tokens",
        ),
        measure(
            "the same rollouts as padded rows", settings, lambda: padded_attention().sum().backward(), f"{rows * length} tokens"
        ),
    ]


# --- the report ------------------------------------------------------------------------------------------------------------


def run_tests() -> str:
    """Run tests/gpu and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return re.sub(r"^=+ | =+$", "", done.stdout.strip().splitlines()[-1])


def measure_all(settings: Settings) -> Iterator[Measurement]:
    """Yield every measurement. One that fails is reported, and the others go on."""
    parts: list[tuple[Callable[..., list[Measurement]], tuple[Any, ...]]] = [
        *((measure_grpo, (offload, dtype)) for dtype in ("float32", "bfloat16") for offload in (False, True)),
        (measure_learner, ()),
        (measure_megatron, ()),
        (measure_attention, ()),
    ]
    for function, arguments in parts:
        try:
            yield from run_in_subprocess(function, settings, *arguments)
        except Exception as error:  # such as no memory left: a result too
            name = " ".join([function.__name__.removeprefix("measure_"), *map(str, arguments)])
            yield Measurement(
                name=f"{name}: failed",
                seconds=0,
                peak_memory=0,
                note=f"{type(error).__name__}: {str(error).splitlines()[0]:.200}",
            )


def describe_machine(device: str) -> str:
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    return f"{name}; " + ", ".join(f"{package} {version}" for package, version in versions().items())


def report(heading: str, tests: str | None, measurements: Iterable[Measurement]) -> str:
    """Format the results as Markdown."""
    rows = [
        f"| {each.name} | {number(each.seconds)} | {each.peak_memory:,.0f} | {each.note} |" for each in measurements
    ]  # fmt: skip
    lines = [heading, "", *([f"tests/gpu: {tests}", ""] if tests else [])]
    return "\n".join([*lines, "| what | seconds | peak memory (MiB) | |", "|---|---|---|---|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model and the batch (default: small)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--steps", type=int, default=5, help="measured repetitions (default: 5)")
    parser.add_argument("--skip-tests", action="store_true", help="do not run tests/gpu first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to a file")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; --device cpu --size tiny tries the benchmark itself", file=sys.stderr)
        return 2
    tests = None if options.skip_tests else run_tests()
    with tempfile.TemporaryDirectory(prefix="strop-first-gpu-") as folder:
        weights = save_model(SIZES[options.size], folder)
        settings = Settings(SIZES[options.size], options.device, options.steps, folder)
        measurements = list(measure_all(settings))
    heading = f"{describe_machine(options.device)}; size {options.size}, {weights}, {options.steps} repetitions"
    print(report(heading, tests, measurements))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": heading, "tests": tests, "rows": [asdict(each) for each in measurements]}))
    return int(any(each.name.endswith("failed") for each in measurements))


if __name__ == "__main__":
    sys.exit(main())

"""Start, samples and publishes of vLLM's and SGLang's engines beside each other: one model, the same requests, in turns.

    STROP_SGLANG_PYTHON=.venv/sglang/bin/python python benchmarks/engines_start_and_publish.py --requests 16 --tokens 64 --repeats 5

The engines live at the same time, and the others rest while one works: each repeat asks the same prompts, lengths and seeds of all, in
alternating order, and publishes the weights to all, proven by fingerprints and by reading every tensor back. A ratio is always that of two
neighbouring turns. Start is the time to the first publish that is proven, and is measured once for each, one after the other.

SGLang's scheduler polls while it has nothing to do, which takes a core from the others; ``sglang-idle`` is SGLang with its argument
``sleep_on_idle``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import MODEL, machine_line, spread, table, use_threads, versions

NAMES = ("vllm", "sglang", "sglang-idle")


def make_engine(name: str, folder: Path, tokenizer: Any, options: argparse.Namespace) -> Any:
    from strop.extensions.sglang.server_process import SglangLaunch
    from strop.extensions.sglang.sglang_config import SglangConfig
    from strop.extensions.sglang.sglang_engine import SglangEngine
    from strop.generation.generation_config import GenerationConfig
    from strop.generation.vllm.engine_args import VllmLaunch
    from strop.generation.vllm.vllm_config import VllmConfig
    from strop.generation.vllm.vllm_engine import VllmEngine

    shared: Any = {"model": str(folder), "on_cpu": True, "environment": {"OMP_NUM_THREADS": str(options.threads)}}
    output = folder / f"{name}.log"
    if name == "vllm":
        config = GenerationConfig(vllm_cfg=VllmConfig(precision=options.dtype, max_model_len=1024, kv_cache_memory_gb=1))
        return VllmEngine(name, VllmLaunch(config=config, output_file=output, **shared), tokenizer, stop_ids=())
    cfg, idle = SglangConfig(dtype=options.dtype, context_length=1024), {"sleep_on_idle": True} if "idle" in name else {}
    config = GenerationConfig(backend="sglang", sglang_cfg=cfg, sglang_kwargs=idle)
    return SglangEngine(name, SglangLaunch(config=config, output_file=output, **shared), tokenizer, stop_ids=())


def make_publisher(engine: Any, model: Any, options: argparse.Namespace) -> Any:
    import torch

    from strop.weight_sync.exporter import make_local_exporter
    from strop.weight_sync.publisher import PublishOptions, WeightPublisher
    from strop.weight_sync.transports.host_memory import MemorySender
    from strop.weight_sync.weight_sync_config import WeightSyncConfig

    exporter = make_local_exporter(
        lambda: model.state_dict().items(), MemorySender, dtype=getattr(torch, options.dtype), keep_snapshot=False
    )
    return WeightPublisher(exporter, [engine], WeightSyncConfig(proof="always"), PublishOptions(separate_devices=True))


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from strop.models.loading import load_model, load_tokenizer
    from strop.sampling import Sampling

    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    engines = {name: make_engine(name, folder, tokenizer, options) for name in options.engines}
    always = {name: make_publisher(engine, model, options) for name, engine in engines.items()}
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    prompts = [
        tokenizer.encode(f"Question {number}: what is {number} plus {number * 7 % 50}? Answer:")
        for number in range(options.requests)
    ]
    sampling = Sampling(max_new_tokens=options.tokens)

    def note(name: str, what: str, value: float) -> None:
        figures[name].setdefault(what, []).append(value)
        if options.verbose:
            print(f"{name:8}{what:20}{value:.3f}", flush=True)

    try:
        for name in engines:
            started = time.perf_counter()
            await always[name].publish(0)
            note(name, "start, s", time.perf_counter() - started)
        for repeat in range(options.repeats + 1):
            for name in sorted(engines, reverse=bool(repeat % 2)):
                started = time.perf_counter()
                asked = [
                    engines[name].generate(prompt, sampling=sampling, seed=1000 * repeat + number)
                    for number, prompt in enumerate(prompts)
                ]
                tokens = sum(len(completion.tokens) for completion in await asyncio.gather(*asked))
                seconds = time.perf_counter() - started
                published = await always[name].publish(repeat + 1)
                if repeat:  # the first is a warm-up
                    note(name, "sampled tokens/s", tokens / seconds)
                    note(name, "samples/s", len(prompts) / seconds)
                    note(name, "publish, proven, s", published["weights/publish_seconds"].value)
                    note(name, "of which sent, s", published["weights/send_seconds"].value)
                    note(name, "of which proof, s", published["weights/proof_seconds"].value)
    finally:
        for name, engine in engines.items():
            await always[name].close()
            await engine.close()
    return {"figures": figures, "versions": versions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES[:2]))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--verbose", action="store_true", help="print each figure as it is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    use_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(options, Path(folder)))
    print(machine_line(result["versions"]))
    figures = result["figures"]
    rows = []
    for what in next(iter(figures.values())):
        row = [what, *(str(spread(figures[name][what])) for name in figures)]
        first, *others = (figures[name][what] for name in figures)
        row += [f"{median(b / a for a, b in zip(first, other, strict=True)):.2f}" for other in others]
        rows.append(row)
    names = list(figures)
    print(table(["", *names, *(f"{name} / {names[0]}" for name in names[1:])], rows))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""The overhead of Strop's generator over vLLM: the same requests to the same engine, through Strop and directly, alternating.

    python benchmarks/vllm_engine.py --requests 64 --tokens 64 --repeats 6

Both sides send the same prompts, lengths and seeds to one engine and request log-probabilities of the sampled tokens. `direct` calls only
vLLM's `AsyncLLM.generate`; `strop` calls `EnginePool.generate`: routing, gate, versions, tensors and text of every completion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from common import DISTURBED, MODEL, foreign_seconds, machine_line, spread, table, use_threads, versions, wait_for_quiet


async def main_async(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    from strop.generation.generation_config import GenerationConfig
    from strop.generation.pool import EnginePool
    from strop.generation.vllm.engine_args import VllmLaunch
    from strop.generation.vllm.vllm_config import VllmConfig
    from strop.generation.vllm.vllm_engine import VllmEngine
    from strop.models.loading import load_model, load_tokenizer
    from strop.sampling import Sampling

    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    model.to(getattr(torch, options.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = VllmConfig(precision=options.dtype, max_model_len=1024, kv_cache_memory_gb=1, sleep_level=0)
    launch = VllmLaunch(
        config=GenerationConfig(vllm_cfg=config), model=str(folder), on_cpu=not torch.cuda.is_available(), load_weights=True,
        environment={"OMP_NUM_THREADS": str(options.threads)}, output_file=folder / "engine.log",
    )  # fmt: skip
    engine = VllmEngine("engine 0", launch, tokenizer, stop_ids=())
    replicas = EnginePool([engine])
    await engine.start()
    await engine.use_own_weights(0)
    replicas.set_version(0)
    texts = [
        f"Question {number}: what is {number} plus {number * 7 % 50}? Think, then answer." for number in range(options.prompts)
    ]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
               for text in texts]  # fmt: skip
    sampling = Sampling(max_new_tokens=options.tokens)

    async def through_strop(round_: int) -> int:
        asked = [
            replicas.generate(prompts[number % len(prompts)], sampling=sampling, seed=1000 * round_ + number)
            for number in range(options.requests)
        ]
        return sum(len(completion.tokens) for completion in await asyncio.gather(*asked))

    async def directly(round_: int) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def one(number: int) -> int:
            params = SamplingParams(
                temperature=1.0, max_tokens=options.tokens, seed=1000 * round_ + number, logprobs=0, ignore_eos=True,
                detokenize=not options.tokens_only, flat_logprobs=options.tokens_only, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            output = None
            async for answer in engine._engine.generate(
                {"prompt_token_ids": list(prompts[number % len(prompts)])}, params, f"direct {round_} {number}"
            ):
                output = answer
            return len(output.outputs[0].token_ids)

        return sum(await asyncio.gather(*(one(number) for number in range(options.requests))))

    sides = {"strop": through_strop, "direct": directly}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    busy: list[float] = []
    for round_ in range(options.repeats + 1):
        wait_for_quiet(options.wait_quiet)
        for name in ("strop", "direct") if round_ % 2 == 0 else ("direct", "strop"):
            await engine.reset_prefix_cache(running=False)
            before, started = foreign_seconds(), time.perf_counter()
            tokens = await sides[name](round_)
            seconds = time.perf_counter() - started
            busy.append((foreign_seconds() - before) / seconds)
            if round_:
                rates[name].append(tokens / seconds)
    await replicas.close()
    ratios = [ours / theirs for ours, theirs in zip(rates["strop"], rates["direct"], strict=True)]
    rows = [[name, str(spread(values))] for name, values in rates.items()] + [["strop / direct", str(spread(ratios))]]
    print(f"other processes used up to {max(busy):.2f} cores")
    print(table(["tokens per second", "median (extremes)"], rows))
    return {"rates": rates, "ratios": ratios, "disturbed": max(busy) > DISTURBED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prompts", type=int, default=8, help="distinct prompts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument(
        "--tokens-only", action="store_true", help="do not request text from vLLM directly, like Strop, which decodes at the end"
    )
    parser.add_argument("--wait-quiet", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    use_threads(1)
    print(machine_line(versions()))
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        found = asyncio.run(main_async(options, Path(folder)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

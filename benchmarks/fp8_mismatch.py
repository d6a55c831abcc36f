"""How far rollouts in low precision are from the policy: mismatch of sampler and learner by format, and what truncation leaves of it.

    python benchmarks/fp8_mismatch.py --model FOLDER --prompts 16 --samples 4 --tokens 32

The embedded engine samples with weights and inputs rounded to each format; the learner, whose weights are not rounded, scores the same
tokens. ``quantised learner`` is the same with the learner's weights and inputs rounded too, as training with fake quantisation has
them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.generation.base import Completion
from strop.generation.quantized_rollouts import EmulatedQuantization
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import make_torch_engine
from strop.models.network import Network
from strop.models.quantization.number_format import NUMBER_FORMATS
from strop.models.quantization.quantization_plan import QuantizationPlan, make_plan
from strop.sampling import Sampling, mix_seed

FORMATS = ("fp8_tensor", "fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8", "nvfp4")
TRUNCATED_AT = 2.0
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """The mismatch of one sampler and one learner, over the sampled tokens."""

    sampler: str
    learner: str
    difference: float  # mean absolute difference of log-probabilities, nats
    error: float  # mean of exp|d|, train/token_mult_prob_error
    divergence: float  # nats a token, KL(sampler || learner), estimated by expm1(d) - d
    beyond: float  # share of tokens with a ratio above TRUNCATED_AT
    largest: float  # ratio
    sample_size: float  # effective sample size of whole rollouts weighted by their ratio, of their number
    truncated: float  # the same with the ratio of each token truncated at TRUNCATED_AT

    def __str__(self) -> str:
        numbers = f"{self.difference:.4f} | {self.error:.4f} | {self.divergence:.5f} | {self.beyond:.2%} | {self.largest:.2f}"
        return f"| {self.sampler} | {self.learner} | {numbers} | {self.sample_size:.2f} | {self.truncated:.2f} |"


HEAD = "| sampler | learner | mean abs d | exp abs d | KL | ratio > 2 | largest ratio | sample size | truncated |\n|" + "---|" * 9


def measure(sampler: str, learner: str, completions: Sequence[Completion], scores: Sequence[Tensor]) -> Row:
    d = [score - completion.logprobs for score, completion in zip(scores, completions, strict=True)]
    every = torch.cat(d).double()
    return Row(
        sampler,
        learner,
        difference=float(every.abs().mean()),
        error=float(every.abs().exp().mean()),
        divergence=float((every.expm1() - every).mean()),
        beyond=float((every.exp() > TRUNCATED_AT).double().mean()),
        largest=float(every.exp().max()),
        sample_size=effective_share([float(each.sum()) for each in d]),
        truncated=effective_share([float(each.clamp(max=torch.tensor(TRUNCATED_AT).log()).sum()) for each in d]),
    )


def effective_share(logs: Sequence[float]) -> float:
    """(sum of weights)^2 / (n x sum of their squares), from the weights' logarithms."""
    weights = torch.tensor(logs, dtype=torch.float64).exp()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


async def sample(network: Network, plan: QuantizationPlan | None, prompts: Sequence[list[int]], options: Any) -> list[Completion]:
    emulated = None if plan is None else EmulatedQuantization(plan, rounds_weights=True)
    config = TorchGenerationConfig(kv_cache_memory_gb=0.5)
    engine = make_torch_engine(network, NoText(), config, length=options.tokens + 128, stop_ids=(), quantization=emulated)
    engine.resume(0)
    sampling = Sampling(max_new_tokens=options.tokens)
    asked = [
        engine.generate(prompt, sampling=sampling, seed=mix_seed(place, copy_))
        for place, prompt in enumerate(prompts)
        for copy_ in range(options.samples)
    ]
    completions = await asyncio.gather(*asked)
    await engine.drain()
    await engine.close()
    return list(completions)


@torch.no_grad()
def score(network: Network, prompts: Sequence[list[int]], completions: Sequence[Completion], options: Any) -> list[Tensor]:
    """The learner's log-probabilities of each completion, one plain forward pass for each."""
    network.use_native_attention()
    found = []
    for index, completion in enumerate(completions):
        prompt = prompts[index // options.samples]
        row = torch.cat([torch.tensor(prompt), completion.tokens])
        with network.autocast():
            logits = network.model(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(-1, completion.tokens[:, None])[:, 0])
    network.use_learner_attention()
    return found


@contextmanager
def quantised(network: Network, plan: QuantizationPlan) -> Iterator[None]:
    """Round the weights and inputs of a learner for the time of the context, in the precision that it computes in."""
    parameters = dict(network.model.named_parameters())
    kept = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    selected = plan.select(parameters)
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: (plan.round_input(inputs[0].to(network.precision)),))
        for name, module in network.model.named_modules()
        if f"{name}.weight" in selected
    ]
    try:
        with torch.no_grad():
            for name in selected:
                parameters[name].copy_(plan.round_weight(parameters[name].to(network.precision)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, tensor in kept.items():
                parameters[name].copy_(tensor)


class NoText:
    """The engine's tokenizer."""

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(1, 50, (count, 2), generator=generator).tolist()
    texts = [[{"role": "user", "content": f"What is {a} + {b}? Explain, then answer."}] for a, b in pairs]
    return [tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=True, return_dict=False) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    network = Network(model, precision=PRECISIONS[options.precision], packed=True)
    prompts = make_prompts(AutoTokenizer.from_pretrained(options.model), options.prompts)
    print(HEAD, flush=True)
    completions = asyncio.run(sample(network, None, prompts, options))
    print(measure(options.precision, options.precision, completions, score(network, prompts, completions, options)), flush=True)
    for name in options.formats:
        plans = {name: make_plan(NUMBER_FORMATS[name])}
        if name == "fp8_block":
            plans[f"{name}, weights alone"] = QuantizationPlan(NUMBER_FORMATS[name])
            plans[f"{name}, cache too"] = make_plan(NUMBER_FORMATS[name], fp8_cache=True)
        for title, plan in plans.items():
            completions = asyncio.run(sample(network, plan, prompts, options))
            plain = score(network, prompts, completions, options)
            print(measure(title, options.precision, completions, plain), flush=True)
            with quantised(network, plan):
                rounded = score(network, prompts, completions, options)
            print(measure(title, "quantised learner", completions, rounded), flush=True)


if __name__ == "__main__":
    main()

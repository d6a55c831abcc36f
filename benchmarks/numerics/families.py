"""Families, rotary embeddings, engines and sampling options against plain Transformers."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from numerics.sections import NOT_RUN, Numbers, Row, Section, default_type
from strop.sampling import Sampling
from support.every_family import CASES, FAMILIES, PLAIN, SCALINGS, compare

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop

PEER = "Transformers"
SERVED = (  # of those in support.vllm_families, which imports vLLM
    *(("llama", scaling) for scaling in ("default", *SCALINGS)),
    ("phi3", "longrope"),
    ("qwen3_moe", "default"),
    ("gemma3", "default"),
)
SAMPLINGS = {
    "temperature=0.7": Sampling(max_new_tokens=40, temperature=0.7),
    "top_k=40": Sampling(max_new_tokens=40, top_k=40),
    "top_p=0.9": Sampling(max_new_tokens=40, top_p=0.9),
    "min_p=0.1": Sampling(max_new_tokens=40, min_p=0.1),
    "temperature=1.2 top_k=40 top_p=0.9": Sampling(max_new_tokens=40, temperature=1.2, top_k=40, top_p=0.9),
}
SAMPLED = (("llama", "default"), ("llama", "dynamic"), ("gemma2", "default"), ("phi3", "longrope"))
COLUMNS = ("scores", "loss", "gradient", "slots", "pages", "scores, bfloat16")
BOUNDS = (1e-6, 1e-6, 4e-6, 1e-6, 1e-6, 0.03)
WHAT = (
    "`scores` are the log-probabilities of rollouts of 8 to 43 tokens, which the learner reads in one micro-batch; `loss` and "
    "`gradient` are those of their mean log-likelihood; `slots` and `pages` are the log-probabilities sampled by the embedded "
    "engine with its two caches. Transformers reads one sequence at a time, with eager attention. For rotary embeddings that "
    "depend on a length, the original length is 24 tokens and the run's longest sequence 96."
)


def measure(name: str, scaling: str, sampling: Sampling = PLAIN) -> Numbers:
    import torch

    with default_type(torch.float32):
        return tuple(vars(compare(name, scaling, sampling)).values())


def families() -> Section:
    return Section(
        "Families and rotary embeddings",
        f"{len(FAMILIES)} families of tiny random models, each with the rotary embeddings that Transformers accepts for it. "
        f"{WHAT} A cell is empty if the embedded engine has no such cache for the family, or if bfloat16 makes the routers of a "
        "mixture choose other experts.",
        COLUMNS,
        BOUNDS,
        tuple(Row(f"{name}, {scaling}", PEER, partial(measure, name, scaling)) for name, scaling in CASES),
    )


def sampling() -> Section:
    rows = (
        Row(f"{name}, {scaling}, {option}", PEER, partial(measure_sampling, name, scaling, option))
        for name, scaling in SAMPLED
        for option in SAMPLINGS
    )
    return Section(
        "Sampling options",
        "The log-probabilities of filtered samples in the learner, which filters like the sampler, and in the embedded engine, "
        "compared with Transformers' logits processors.",
        ("scores", "slots", "pages"),
        (1e-6, 1e-6, 1e-6),
        tuple(rows),
    )


def measure_sampling(name: str, scaling: str, option: str) -> Numbers:
    scores, _, _, slots, pages, _ = measure(name, scaling, SAMPLINGS[option])
    return scores, slots, pages


def vllm() -> Section:
    return Section(
        "Real vLLM engines",
        "Log-probabilities sampled by a vLLM engine in float32, after Strop published the weights to it and configured the "
        "run's longest sequence, compared with plain Transformers.",
        ("log-probabilities",),
        (1e-6,),
        tuple(Row(f"{name}, {scaling}", PEER, partial(measure_vllm, name, scaling)) for name, scaling in SERVED),
    )


@cache
def engine_room() -> BackgroundLoop:
    from support.vllm_engines import BackgroundLoop

    return BackgroundLoop()


def measure_vllm(name: str, scaling: str) -> Numbers:
    if find_spec("vllm") is None:
        return NOT_RUN
    import torch

    from support.forks import with_vllm
    from support.vllm_families import compare_in_vllm

    with with_vllm(), default_type(torch.float32), tempfile.TemporaryDirectory(prefix="strop-numerics-") as folder:
        return (compare_in_vllm(engine_room(), name, scaling, Path(folder)),)

"""Validation holds the weights once: bytes of tensors that are alive, counted while it runs."""

from __future__ import annotations

import asyncio

import pytest
import torch

from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.weight_average import AveragedWeights
from strop.models.network import Network
from strop.sampling import Sampling
from support.models import build, living_bytes, weight_bytes
from support.torch_engine import Request, generate_all, make_engine, make_runner

SAMPLING = Sampling(max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_takes_the_place_of_the_weights_without_a_copy_of_them(dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype)
    named = list(model.named_parameters())
    masters = MasterWeights(named)
    average = AveragedWeights(masters.named_parameters, decay=0.5)
    before = living_bytes()
    with average.swap_in(named):
        assert living_bytes() - before < 0.05 * weight_bytes(model)


def test_an_engine_on_the_learner_s_module_validates_with_the_learner_s_weights() -> None:
    network = Network(build("llama"))
    runner = make_runner(network)
    engine = make_engine(runner)
    held: dict[str, int] = {"before": living_bytes()}

    def note(token: int, logprob: float) -> None:
        held["while"] = living_bytes()

    async def validate() -> None:
        request = Request([5, 40, 200], SAMPLING, seed=1)
        await generate_all(engine, [request])
        await engine.generate([5, 40, 7], sampling=SAMPLING, seed=2, on_token=note)
        await engine.close()

    asyncio.run(validate())
    assert held["while"] - held["before"] < 0.2 * weight_bytes(network.model)

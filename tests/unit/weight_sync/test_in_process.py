"""Colocated in one process: nothing is sent, the generators are held while the learner works."""

import asyncio

from loop.fakes import FakeGenerator
from strop.weight_sync.in_process import InProcessWeights


def test_every_generator_is_drained_and_resumed_with_the_new_version():
    generators = [FakeGenerator(None), FakeGenerator(None)]
    weights = InProcessWeights(generators)

    async def step():
        await weights.yield_device()
        before = [list(generator.events) for generator in generators]
        return before, await weights.publish(4)

    before, found = asyncio.run(step())
    assert before == [["drain"], ["drain"]]
    assert [(generator.version, generator.events) for generator in generators] == [(4, ["drain", "resume 4"])] * 2
    assert found["weights/publish_seconds"].value >= 0

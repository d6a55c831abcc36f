"""A draft head that the learner trains, in a real vLLM engine: sent at each publish, proven, and in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.vllm.vllm_config import SpeculationConfig
from strop.models.network import Network
from strop.sampling import Sampling
from support.drafts import make_learned_head
from support.rollouts import make_group, make_rollout, sampled_turn
from support.vllm_engines import compute_logprobs

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

PROMPT = tuple(range(40, 60))


class Drafted:
    """A served model and its head."""

    def __init__(self, served: ServedModel, network: Network) -> None:
        self.served, self.head = served, network.draft
        assert self.head is not None
        self.learned = {name: tensor.clone() for name, tensor in self.head.state_dict().items()}


@pytest.fixture(scope="module")
def drafted(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[Drafted]:
    from support.vllm_engines import serve_vllm, served_model

    model = served_model(layers=4)
    network = Network(model)
    network.use_native_attention()
    greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=60, do_sample=False, eos_token_id=-1)[0, len(PROMPT) :]
    network.use_learner_attention()
    known = make_group(*(make_rollout(PROMPT, sampled_turn(greedy.tolist()), reward=float(place)) for place in range(2)))
    head = make_learned_head(network, steps=60, groups=[known])
    network.use_native_attention()
    folder = tmp_path_factory.mktemp("eagle")
    keys = {
        "draft": str(head.save(folder / "draft")),
        "speculation": SpeculationConfig(method="eagle3", num_speculative_tokens=3),
    }
    served = serve_vllm(model, tokenizer, folder, drafted=head.published_weights, **keys)
    room.run(served.weights.publish(0))
    yield Drafted(served, network)
    room.run(served.close())


def sample(room: BackgroundLoop, served: ServedModel, sampling: Sampling, number: int) -> list[Any]:
    import asyncio

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(served.pool.generate(PROMPT, sampling=sampling, seed=seed) for seed in range(number)))

    return room.run(all_of_them())


def acceptance(room: BackgroundLoop, served: ServedModel) -> float:
    served.pool.collect_metrics()
    sample(room, served, Sampling(temperature=0.0, max_new_tokens=40), 2)
    return served.pool.collect_metrics()["generation/acceptance_rate"]


def test_logprobs_are_those_of_the_policy(room: BackgroundLoop, drafted: Drafted) -> None:
    sampling = Sampling(temperature=0.8, max_new_tokens=24)
    for completion in sample(room, drafted.served, sampling, 4):
        expected = compute_logprobs(drafted.served.model, PROMPT, completion.tokens, sampling)
        assert (completion.logprobs - expected).abs().max() < 2e-4


def test_the_engine_drafts_with_the_head_that_was_published_last(room: BackgroundLoop, drafted: Drafted) -> None:
    before = acceptance(room, drafted.served)
    assert before > 0.3 and drafted.head is not None
    with torch.no_grad():
        drafted.head.lm_head.weight.copy_(drafted.head.lm_head.weight.roll(1, 0))  # every draft is the token beside the right one
    room.run(drafted.served.weights.publish(drafted.served.weights.version + 1))
    assert acceptance(room, drafted.served) < before / 2
    drafted.head.load_state_dict(drafted.learned)
    room.run(drafted.served.weights.publish(drafted.served.weights.version + 1))
    assert acceptance(room, drafted.served) > before / 2


def test_every_tensor_of_the_head_is_read_back(room: BackgroundLoop, drafted: Drafted) -> None:
    assert drafted.head is not None
    found = room.run(drafted.served.engine.read_back_fingerprints())
    names = {name for name, _ in drafted.head.published_weights()}
    assert names <= set(found) and len(names) == 13

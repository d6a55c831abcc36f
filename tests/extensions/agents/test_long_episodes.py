"""Episodes of hundreds of turns, with compaction, sub-agents and retries: one batch with the gradient of its sequences; and budgets."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic
import openai
import pytest
import torch

from strop.environments.base import EnvironmentConfigError
from strop.extensions.agents.episode_budget import EpisodeBudget
from strop.extensions.agents.external_agent import ExternalAgent
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Ending, Rollout
from support.agents import Recorder, check_tree, make_session, play
from support.models import build, copy_gradients, largest_difference, to_float64
from support.packed import path_rows
from support.rollouts import make_group, pack_grpo

TURNS, COMPACTED_EVERY = 300, 50


def work_for_long(task: Any, endpoint: Any) -> float:
    """300 turns, compacted after each 50; two sub-agents of four turns; a retry now and then. Half of it through each API."""
    chat = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages_api = anthropic.Anthropic(base_url=endpoint.environ["ANTHROPIC_BASE_URL"], api_key=endpoint.api_key, max_retries=0)

    def ask(messages: list[Any], number: int) -> str:
        if number % 2:
            reply: Any = messages_api.messages.create(
                model="m", max_tokens=50, system=messages[0]["content"], messages=messages[1:]
            )
            return reply.content[0].text
        return chat.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""

    def converse(messages: list[Any], turns: int) -> str:
        said = ""
        for number in range(turns):
            said = ask(messages, number)
            if number % 20 == 19:
                said = ask(messages, number)  # a retry; the conversation goes on with its reply
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"on {number}"}]
        return said

    rules, found = {"role": "system", "content": "Work."}, "nothing yet"
    for part in range(TURNS // COMPACTED_EVERY):
        found = converse([rules, {"role": "user", "content": f"So far {part}: {found}"}], COMPACTED_EVERY)
        if part in (1, 3):
            found = converse([{"role": "system", "content": f"Help {part}."}, {"role": "user", "content": found}], 4)
    return 1.0


def log_probabilities_path_by_path(model: torch.nn.Module, rollout: Rollout) -> torch.Tensor:
    found = []
    for context, tokens, turns in path_rows(rollout):
        logs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        sampled = [place for turn in turns for place in [turn.sampled] * len(turn.tokens)]
        found += [logs[context + at - 1, tokens[context + at]] for at, own in enumerate(sampled) if own]
    return torch.stack(found)


@pytest.mark.slow
def test_300_turns_with_compaction_and_sub_agents_give_one_batch_with_the_gradient_of_its_sequences() -> None:
    generator = Recorder()
    rollout = play(work_for_long, generator, environment={}, max_turns=400, max_length=8000)
    assert rollout.error is None and rollout.ending is Ending.STOP and rollout.reward == 1.0
    check_tree(rollout, generator.sampled)
    retries = 6 * 2
    assert len(rollout.policy_turns) == TURNS + retries + 8 and rollout.metrics["gateway/retries"] == retries
    assert len(rollout.branches) == 5 + 2 + retries and rollout.metrics["gateway/rewritten"] == 0
    model = to_float64(build("qwen3"))
    model.set_attn_implementation("sdpa")  # eager attention takes its softmax in float32
    batch = pack_grpo([make_group(rollout)])
    assert batch.num_sequences == 1 and len(batch.target) == sum(len(each.tokens) for _, each in generator.sampled)
    weights = torch.linspace(-1, 1, len(batch.target), dtype=torch.float64)
    wanted = log_probabilities_path_by_path(model, rollout)
    (wanted * weights).sum().backward()
    gradients = copy_gradients(model)
    model.zero_grad()
    found = Network(model, precision=torch.float64, packed=True).outputs(batch, Sampling()).logprobs
    (found * weights).sum().backward()
    assert float((found - wanted).detach().abs().max()) < 1e-10
    assert largest_difference(copy_gradients(model), gradients) < 1e-10


def test_a_long_episode_takes_memory_in_proportion_to_its_length() -> None:
    """What the exchanges hold themselves: each only what was new to the policy."""

    def held(turns: int) -> int:
        session = make_session(Recorder(), max_length=10**6)
        messages: list[Any] = [{"role": "user", "content": "Begin."}]

        async def run() -> None:
            for number in range(turns):
                session.count_request()
                asked, encoded = session.read({"messages": messages}, is_chat=True)
                _, (reply,) = await session.complete(asked, encoded)
                messages.extend(
                    [{"role": "assistant", "content": reply.content}, {"role": "user", "content": f"on {number % 10}"}]
                )

        asyncio.run(run())
        return sum(sys.getsizeof(each.added) for each in session.exchanges)

    assert held(200) < 5 * held(50)


def talk(endpoint: Any, requests: int) -> None:
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    for number in range(requests):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}"}])


@pytest.mark.parametrize(
    "budget",
    [{"max_episode_tokens": 7}, {"max_episode_cost": 0.001, "read_price": 10.0, "sampled_price": 40.0}],
    ids=["tokens", "cost"],
)
def test_an_episode_that_used_up_its_budget_ends_so(budget: dict[str, float]) -> None:
    def agent(task: Any, endpoint: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=r"max_episode_\w+ of the environment allows") as caught:
            talk(endpoint, 10)
        assert caught.value.code == "budget_exceeded"
        raise caught.value

    generator = Recorder(*["ab"] * 10)
    rollout = play(agent, generator, environment=budget)
    assert rollout.ending is Ending.BUDGET and not rollout.ending.is_failure and rollout.counts
    assert rollout.error is None and rollout.rewards == {"score": 0.0}
    read = sum(len(prompt) for prompt, _ in generator.sampled)
    if "max_episode_tokens" in budget:
        assert rollout.sampled_tokens == 7 and len(rollout.policy_turns) == 3  # the last completion was cut
    else:
        assert 500 < 10 * read + 40 * rollout.sampled_tokens <= 1000
    prices = EpisodeBudget(max_cost=0.001, read_price=10.0, sampled_price=40.0)
    assert prices.find_rest(0, 0, 20) == [20] and prices.find_rest(20, 10, 20) == [5]  # 200 + 400 + 200 of 1000


def test_a_cost_without_a_price_is_refused() -> None:
    with pytest.raises(EnvironmentConfigError, match="set a price per million tokens"):
        ExternalAgent(agent=print, max_episode_cost=1.0)

"""The agent of agent.yaml: it lets the policy answer, asks it to check that, and scores the last answer."""

import re
from typing import Any

from openai import AsyncOpenAI

from strop import Task
from strop.extensions.agents.endpoint import Endpoint


async def solve(task: Task, endpoint: Endpoint) -> dict[str, Any]:
    """Return the reward of an episode, and values to log."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = [{"role": "user", "content": f"{task.question} Answer with one number."}]
    first = await ask(client, endpoint.model, messages)
    messages += [first, {"role": "user", "content": "Check that, step by step. Then say the right number again."}]
    last = await ask(client, endpoint.model, messages)
    right = [find_number(answer) == task.answer for answer in (first["content"], last["content"])]
    return {"reward": float(right[-1]), "output": last["content"], "metrics": {"right_at_first": float(right[0])}}


async def ask(client: AsyncOpenAI, model: str, messages: list[Any]) -> dict[str, str]:
    """Return the policy's next message; what is sampled there is trained on."""
    reply = await client.chat.completions.create(model=model, messages=messages)
    return {"role": "assistant", "content": reply.choices[0].message.content or ""}


def find_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else None

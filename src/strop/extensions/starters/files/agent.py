"""The agent of agent.yaml, which lets the policy write a calculation, computes it, and lets the policy answer; and its rewards."""

import re
from typing import Any

from openai import AsyncOpenAI

from strop import Rollout, Task
from strop.extensions.agents.endpoint import Endpoint

CALL = re.compile(r"<calc>\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")
BEGINNING = [  # small models copy what they see
    {"role": "system", "content": "Write <calc>12 * 34</calc>, with + - or *, to use a calculator. Then answer."},
    {"role": "user", "content": "What is 12 * 34?"},
    {"role": "assistant", "content": "<calc>12 * 34</calc>"},
    {"role": "user", "content": "408"},
    {"role": "assistant", "content": "The answer is 408."},
]


async def solve(task: Task, endpoint: Endpoint) -> None:
    """Play one episode; every message that the policy writes in it is trained on."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = [*BEGINNING, {"role": "user", "content": task.question}]
    said = await ask(client, endpoint.model, messages)
    if (call := CALL.search(said)) is not None:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": calculate(*call.groups())}]
        await ask(client, endpoint.model, messages)


async def ask(client: AsyncOpenAI, model: str, messages: list[Any]) -> str:
    reply = await client.chat.completions.create(model=model, messages=messages, stop=["</calc>"])
    return reply.choices[0].message.content or ""


def calculate(left: str, sign: str, right: str) -> str:
    """The policy's text is never evaluated as code."""
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def correct(task: Task, rollout: Rollout) -> bool:
    """The last number of the last reply is the answer."""
    return re.findall(r"-?\d+", rollout.text.replace(",", ""))[-1:] == [task.answer]


def called(task: Task, rollout: Rollout) -> float:
    """A calculation could be read."""
    return float(any(CALL.search(turn.text) for turn in rollout.policy_turns))

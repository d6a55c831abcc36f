"""Messages between the training process and a process of the gateway, over a socket that only these two have.

To the process of the gateway: Start, UseTemplate, BeginSession, EndSession, Generated.
To the training process: Listening, Alive, SessionBegun, SessionEnded, Generate, Cancel.
"""

from __future__ import annotations

import asyncio
import pickle
from array import array
from dataclasses import dataclass
from typing import Any

from strop.extensions.agents.gateway.agent_session import SessionOptions, SessionOutcome
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.generation.base import InvalidRequest
from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling
from strop.types import PromptImage

LENGTH_BYTES = 8  # before each message


@dataclass(frozen=True)
class Start:
    config: GatewayConfig
    port: int


@dataclass(frozen=True)
class Listening:
    address: str


@dataclass(frozen=True)
class Alive:
    """Sent every few seconds: the event loop turns."""


@dataclass(frozen=True)
class UseTemplate:
    number: int
    template: ChatTemplate


@dataclass(frozen=True)
class BeginSession:
    session: int
    key: str  # digest of the agent's key
    options: SessionOptions
    template: int


@dataclass(frozen=True)
class SessionBegun:
    """The agent's key is known."""

    session: int


@dataclass(frozen=True)
class EndSession:
    session: int


@dataclass(frozen=True)
class SessionEnded:
    session: int
    outcome: SessionOutcome  # the sampled turns of its rollout have no tokens
    requests: tuple[int, ...]  # that sampled these turns, in the order of ``policy_turns``


@dataclass(frozen=True)
class Generate:
    request: int
    session: int
    prompt: array[int]
    sampling: Sampling
    seed: int
    images: tuple[PromptImage, ...]


@dataclass(frozen=True)
class Cancel:
    request: int


@dataclass(frozen=True)
class Sampled:
    """What a session needs of a completion; the training process keeps the rest."""

    tokens: array[int]
    logprobs: array[float]
    text: str
    stopped: bool


@dataclass(frozen=True)
class Generated:
    request: int
    result: Sampled | InvalidRequest | None  # None: the engine failed


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Send a message, unless the other side is gone."""
    if not writer.is_closing():
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)


async def receive(reader: asyncio.StreamReader) -> Any:
    """Receive a message. Raises EOFError when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other process is gone") from error

"""Environments served by OpenEnv, by its client protocol: one WebSocket for each episode. The package itself is not needed here."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from strop.endings import Ending, RolloutFailed
from strop.environments.answers import extract_last_tagged
from strop.environments.base import EnvironmentConfigError
from strop.environments.rewards import to_number
from strop.extensions.adapters.stepped_environment import SeededTask, SteppedAnswer, SteppedEnvironment
from strop.packages import install_command
from strop.safety.printable import shorten
from strop.user_code import suggest_names

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0  # seconds between tries to get a session of a server that is full


class OpenEnvError(RolloutFailed):
    """A server of OpenEnv failed, or cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class OpenEnvEnvironment(SteppedEnvironment):
    """An environment behind a server of OpenEnv, which is started separately from the run."""

    base_url: str  # such as http://localhost:8000
    # What the policy is told at first; {schema} is the JSON schema of an action. The first observation follows.
    instruction: str = ""
    # The field of an action that the policy's text is; "": the only field that an action has, else the text is the action as JSON. Either
    # way the last <action>...</action> is read, where there is one.
    action_field: str = ""
    observation_field: str = ""  # the field of an observation that the policy reads; "": the only field, else all of it as JSON
    reset: Mapping[str, Any] = field(default_factory=dict)  # further arguments of reset, in addition to seed
    invalid_reward: float = 0.0  # of a turn whose action the server refuses, after which the policy may try again
    timeout_s: float = 60.0  # for an answer of the server, and for a free session

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_url.startswith(("http://", "https://")):
            raise EnvironmentConfigError(f"base_url is {self.base_url!r}; an address begins with http:// or https://")
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise EnvironmentConfigError(f"the environment openenv needs a package: {install_command('serve')}") from error
        known = {"action_field": "action", "observation_field": "observation"}
        for option, kind in known.items():
            name, fields = getattr(self, option), self._fields(kind)
            if name and name not in fields:
                raise EnvironmentConfigError(
                    f"{option} is {name!r}, but the {kind}s of {self.base_url} have {', '.join(fields)}{suggest_names(name, fields)}"
                )

    @cached_property
    def schema(self) -> Mapping[str, Any]:
        """The server's JSON schemas of actions and observations. Raises EnvironmentConfigError."""
        try:
            with urllib.request.urlopen(f"{self.base_url.rstrip('/')}/schema", timeout=self.timeout_s) as answer:
                found: Mapping[str, Any] = json.loads(answer.read())
        except (OSError, ValueError) as error:
            raise EnvironmentConfigError(
                f"no server of OpenEnv answers at {self.base_url} ({error}); start it, or set base_url to where it is"
            ) from error
        return found

    def _fields(self, kind: str) -> list[str]:
        """Return the fields of actions or observations that are the environment's own."""
        return [name for name in self.schema.get(kind, {}).get("properties", {}) if name not in ("metadata", "done", "reward")]

    @property
    def game_name(self) -> str:
        return "openenv"

    async def open_game(self, task: SeededTask) -> _OpenEnvGame:
        game = _OpenEnvGame(self, task.seed)
        try:
            await game.connect()
        except BaseException:
            await game.close()
            raise
        return game

    def read_action(self, text: str) -> Mapping[str, Any]:
        """Return the action that a text stands for. Raises ValueError, which the policy reads."""
        tagged = extract_last_tagged(text, "action")
        given = text.strip() if tagged is None else tagged
        fields = self._fields("action")
        if name := self.action_field or (fields[0] if len(fields) == 1 else ""):
            kind = self.schema["action"]["properties"].get(name, {}).get("type", "string")
            return {name: given if kind == "string" else _from_json(given)}
        action = _from_json(given)
        if not isinstance(action, Mapping):
            raise ValueError(f"{given[:80]!r} is not an action: write a JSON object with {', '.join(fields)}.")
        return action

    def describe_observation(self, observation: Any) -> str:
        values = observation if isinstance(observation, Mapping) else {"observation": observation}
        name = self.observation_field or (next(iter(values)) if len(values) == 1 else "")
        value = values.get(name, "") if name else values
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text[:100_000])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no JSON.") from error


class _OpenEnvGame:
    """A session of a server, over a separate WebSocket."""

    def __init__(self, options: OpenEnvEnvironment, seed: int) -> None:
        self._options, self._seed = options, seed
        self._client: Any = None
        self._socket: Any = None
        self._opening: Mapping[str, Any] = {}

    async def connect(self) -> None:
        """Open a session and reset it. A server that is full is asked again until the time limit. Raises OpenEnvError."""
        import aiohttp

        self._client = aiohttp.ClientSession()
        deadline, wait = time.monotonic() + self._options.timeout_s, FIRST_WAIT
        while True:
            try:
                self._socket = await self._client.ws_connect(f"{self._options.base_url.rstrip('/')}/ws", max_msg_size=0)
            except aiohttp.ClientError as error:
                raise OpenEnvError(
                    f"the server at {self._options.base_url} cannot be reached: {error}", Ending.SERVICE
                ) from error
            answer = await self._ask({"type": "reset", "data": {**self._options.reset, "seed": self._seed}})
            if answer["type"] != "error":
                self._opening = answer["data"]
                return
            if answer["data"].get("code") != "CAPACITY_REACHED" or time.monotonic() + wait > deadline:
                raise OpenEnvError(self._describe_error(answer["data"]), Ending.SERVICE)
            await self._socket.close()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def start(self) -> str:
        instruction = self._options.instruction
        if "{schema}" in instruction:
            instruction = instruction.replace("{schema}", json.dumps(self._options.schema["action"]))
        return f"{instruction}\n\n{self._options.describe_observation(self._opening.get('observation'))}".strip()

    async def step(self, text: str) -> SteppedAnswer:
        try:
            action = self._options.read_action(text)
        except ValueError as error:
            return SteppedAnswer(str(error), self._options.invalid_reward, invalid=True)
        answer = await self._ask({"type": "step", "data": dict(action)})
        data = answer["data"]
        if answer["type"] == "error":
            if data.get("code") != "VALIDATION_ERROR":
                raise OpenEnvError(self._describe_error(data))
            return SteppedAnswer(f"This is not an action: {_describe_refusal(data)}", self._options.invalid_reward, invalid=True)
        earned = data.get("reward")
        if earned is not None and (earned := to_number(earned)) is None:
            raise OpenEnvError(
                f"the server at {self._options.base_url} gave the reward {data['reward']!r:.80}, not a finite number"
            )
        over = bool(data.get("done"))
        return SteppedAnswer("" if over else self._options.describe_observation(data.get("observation")), earned, over)

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        if self._client is not None:
            await self._client.close()

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the answer to it. Raises OpenEnvError."""
        import aiohttp

        try:
            await self._socket.send_json(message)
            answer = await asyncio.wait_for(self._socket.receive(), self._options.timeout_s)
        except TimeoutError as error:
            raise OpenEnvError(
                f"the server at {self._options.base_url} gave no answer within {self._options.timeout_s:g} s (timeout_s of the environment)"
            ) from error
        except (ConnectionError, aiohttp.ClientError) as error:
            # A full server says so and closes before it reads.
            answer = await self._socket.receive()
            if answer.type is not aiohttp.WSMsgType.TEXT:
                raise OpenEnvError(f"the server at {self._options.base_url} closed the session: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvError(f"the server at {self._options.base_url} closed the session")
        found: Mapping[str, Any] = json.loads(answer.data)
        return found

    def _describe_error(self, data: Mapping[str, Any]) -> str:
        return f"the server at {self._options.base_url} reports {data.get('code')}: {shorten(str(data.get('message')), 300)}"


def _describe_refusal(data: Mapping[str, Any]) -> str:
    errors = data.get("errors") or [{"msg": data.get("message", "")}]
    return "; ".join(f"{'.'.join(map(str, error.get('loc', ())))} {error.get('msg', '')}".strip() for error in errors)[:500]

"""Starts NeMo-Gym's servers in an interpreter that has NeMo-Gym, and lets its agents work on rows. It does not import Strop.

``runner.py`` calls it. NeMo-Gym merges the configuration and starts the servers, each in its own process (``RunHelper``), as it does for
NeMo-RL. Only the servers of the policy's model are replaced, by one here for each of their names: it passes requests on to the gateway
that answers the rollout of the request. Agents put the rollout into the path (``token_id_capture``).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POLICY = "http://policy.invalid/v1"  # what servers of the policy's model have in policy_base_url
FULL = ("context_length_exceeded", "max_turns_exceeded", "budget_exceeded")  # codes of the gateway: the conversation has ended
NO_EFFECT = {  # options of a model server that change nothing of what the policy reads, or are the run's
    "entrypoint", "host", "port", "name", "base_url", "api_key", "model", "openai_base_url", "openai_api_key", "openai_model", "domain",
    "return_token_id_information", "request_prompt_and_generation_token_ids", "num_workers", "num_groups_nemo_rl", "max_input_tokens",
    "uses_reasoning_parser", "description", "value", "verified",
}  # fmt: skip
POLL_SECONDS = 2.0  # between looks at the servers' processes


@dataclass
class GymRollout:
    """Where the policy answers a rollout, and whether it has."""

    base_url: str
    api_key: str
    answered: int = 0
    refused: str = ""  # why a request of it was not passed on


@dataclass
class PolicyServer:
    """What takes the place of one server of the policy's model."""

    name: str
    host: str
    port: int
    template_options: dict[str, Any] = field(default_factory=dict)  # for the chat template
    continues_thoughts: bool = True  # whether it answers after a reply of thoughts alone (sequential_reasoning_allowed)

    def prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add the options of the chat template, those of the row last."""
        options = {**self.template_options, **json.loads((body.get("metadata") or {}).get("chat_template_kwargs") or "{}")}
        return {**body, "chat_template_kwargs": options} if options else body

    def ends_at(self, body: dict[str, Any]) -> bool:
        items = body.get("input")
        last = items[-1] if isinstance(items, list) and items else {}
        return not self.continues_thoughts and (
            last.get("type") == "reasoning" or (last.get("role") == "assistant" and not last.get("content"))
        )


class NemoGymRunner:
    """NeMo-Gym's servers, and the rollouts in progress."""

    def __init__(self) -> None:
        self._rollouts: dict[str, GymRollout] = {}
        self._helper: Any = None
        self._closing: list[Any] = []
        self._dead = ""  # why no rollout can succeed any more
        self._watch: asyncio.Task[None] | None = None

    async def load(self, config: dict[str, Any]) -> list[str]:
        """Start the servers. Returns the names of the agents."""
        os.environ["TQDM_DISABLE"] = "1"
        parsed, options = await asyncio.to_thread(parse, config)
        for policy in take_policy_servers(parsed):
            await self._serve(policy)
        await asyncio.to_thread(self._start, options)
        from nemo_gym.global_config import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME

        os.environ[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = "{}"  # the configuration of this process is known, and not asked for
        self._watch = asyncio.create_task(self._poll())
        return [
            str(name) for name, section in parsed.items() if isinstance(section, Mapping) and "responses_api_agents" in section
        ]

    def _start(self, options: Any) -> None:
        from nemo_gym.cli.env import RunHelper

        helper = RunHelper()
        helper.start(options)
        self._helper = helper

    async def _poll(self) -> None:
        while not self._dead:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self._helper.poll()
            except Exception as error:
                self._dead = str(error)

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Let the agent of a row work on it. Returns its result, or why there is none."""
        from nemo_gym.rollout_collection import RolloutCollectionHelper

        name = uuid.uuid4().hex
        rollout = self._rollouts[name] = GymRollout(base_url, api_key)
        running: asyncio.Future[Any] | None = None
        try:
            (work,) = RolloutCollectionHelper().run_examples([{**row, "_ng_rollout_id": name}])
            running = asyncio.ensure_future(work)
            while not running.done() and not self._dead:
                await asyncio.wait([running], timeout=POLL_SECONDS / 2)
            if self._dead:
                return {"failure": self._dead, "ending": "service"}
            _, result = running.result()
        except Exception as error:
            content: bytes = getattr(error, "response_content", None) or b""
            why = f"{type(error).__name__}: {error} {rollout.refused or content.decode(errors='replace')}"[:2000]
            return {"failure": why, "ending": "error" if rollout.answered else "service"}
        finally:
            if running is not None:
                running.cancel()
            del self._rollouts[name]
        kept = ("reward", "reward_components", "mask_sample", "failure_kind", "failure_reason")
        numbers = {
            key: float(value) for key, value in result.items() if isinstance(value, int | float) and not key.startswith("_")
        }
        return {"result": {key: result[key] for key in kept if key in result}, "metrics": numbers}

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._helper is not None:
            await asyncio.to_thread(self._helper.shutdown)
        for runner in self._closing:
            await runner.cleanup()

    async def _serve(self, policy: PolicyServer) -> None:
        from aiohttp import web

        async def root(request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        async def answer(request: web.Request) -> Any:
            return await self._answer(policy, request)

        app = web.Application(client_max_size=2**30)
        app.router.add_get("/", root)
        app.router.add_route("*", "/ng-rollout/{rollout}/training-token-capture/v1/{path:.*}", answer)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, policy.host, policy.port).start()
        self._closing.append(runner)

    async def _answer(self, policy: PolicyServer, request: Any) -> Any:
        import aiohttp
        from aiohttp import web

        rollout, path = self._rollouts.get(request.match_info.get("rollout", "")), request.match_info["path"]
        if rollout is None:
            return self._refuse(policy, request)
        body = await request.json() if request.can_read_body else None
        if isinstance(body, dict) and path != "messages":
            body = policy.prepare(body)
            if policy.ends_at(body):
                return web.json_response(end_response(body, "content_filter"))
        headers = {"Authorization": f"Bearer {rollout.api_key}"}
        limit = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.request(request.method, f"{rollout.base_url}/{path}", json=body, headers=headers) as found,
        ):
            rollout.answered += found.status == 200
            if found.status != 200:
                rollout.refused = await found.text()
                if path == "responses" and any(code in rollout.refused for code in FULL):
                    return web.json_response(end_response(body or {}, "max_output_tokens"))
                return web.Response(status=found.status, text=rollout.refused, content_type="application/json")
            answer = web.StreamResponse(status=found.status, headers={"Content-Type": found.headers["Content-Type"]})
            await answer.prepare(request)
            async for part in found.content.iter_any():
                await answer.write(part)
            await answer.write_eof()
            return answer

    def _refuse(self, policy: PolicyServer, request: Any) -> Any:
        """Answer a request that names no rollout."""
        from aiohttp import web

        why = (
            f"{policy.name} is the policy in training, and the request {request.path} names no rollout in progress: agents name theirs by "
            "url_path_for_run or base_url_for_run, and a judge must be another model"
        )
        if len(self._rollouts) == 1:
            next(iter(self._rollouts.values())).refused = why
        print(why, file=sys.stderr)
        return web.json_response({"error": {"message": why}}, status=422)


def parse(config: dict[str, Any]) -> tuple[Any, Any]:
    """Merge the configuration files and check the result. Returns it, and the options that NeMo-Gym finds it again by."""
    from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
    from omegaconf import OmegaConf

    given = {
        **config,
        "policy_base_url": POLICY,
        "policy_api_key": "none",
        "policy_model_name": config.get("policy_model_name", "policy"),
        "token_id_capture": {"enabled": True, "all_agents": True, "rebuild_response": False},
        "head_server": config.get("head_server") or {"host": "127.0.0.1", "port": find_port()},
    }
    options = GlobalConfigDictParserConfig(initial_global_config_dict=OmegaConf.create(given), skip_load_from_cli=True)
    return get_global_config_dict(options), options


def find_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def take_policy_servers(parsed: Any) -> list[PolicyServer]:
    """Remove from the configuration, as NeMo-Gym starts it, the servers of the policy's model. Raises ValueError for an option that would
    have an effect."""
    from omegaconf import OmegaConf, open_dict

    found = []
    for name, section in parsed.items():
        for kind, server in ((section.get("responses_api_models") if isinstance(section, Mapping) else None) or {}).items():
            values = OmegaConf.to_container(server, resolve=True)
            assert isinstance(values, dict)
            address = values.get("base_url") or values.get("openai_base_url")
            if address not in (POLICY, [POLICY]):
                continue
            policy = read_policy_server(str(name), kind, {str(key): value for key, value in values.items()})
            found.append(policy)
            with open_dict(server):
                del server["entrypoint"]
                server["base_url"] = f"http://{policy.host}:{policy.port}"
                server.pop("openai_base_url", None)
    return found


def read_policy_server(name: str, kind: str, values: dict[str, Any]) -> PolicyServer:
    extra = dict(values.pop("extra_body", None) or {})
    options = {**(values.pop("chat_template_kwargs", None) or {}), **(extra.pop("chat_template_kwargs", None) or {})}
    policy = PolicyServer(name, values["host"], values["port"], options, values.pop("sequential_reasoning_allowed", True))
    unknown = [key for key, value in values.items() if key not in NO_EFFECT and value not in (None, False, "", [], {})]
    unknown += [f"extra_body.{key}" for key in extra]
    if unknown:
        raise ValueError(
            f"{name}.responses_api_models.{kind} sets {', '.join(unknown)}, which the gateway that answers for the policy does not have; "
            "remove it"
        )
    return policy


def end_response(body: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return the response that ends an agent's conversation, as NeMo-Gym's model server does: nothing was written."""
    text = {"type": "output_text", "text": "", "annotations": []}
    message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "incomplete", "content": [text]}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "output": [message],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "incomplete_details": {"reason": reason},
    }

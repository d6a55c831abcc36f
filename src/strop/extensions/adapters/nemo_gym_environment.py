"""NeMo-Gym's servers. The run starts them with NeMo-Gym (``config``), or reaches resource servers that run separately from it.

In the first case NeMo-Gym's own agents work on the tasks, and the gateway takes the place of its servers for the policy's model
(``nemo_gym_runner.py``). In the second Strop replaces its agents, too: ``simple_agent``, which calls the tools of a resource
server until the policy calls none and then asks ``/verify`` for the reward, and of ``gymnasium_agent``, which asks /reset and /step.
"""

from __future__ import annotations

import json
import urllib.request
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed, failing_as
from strop.environments.base import EnvironmentConfigError, GeneratedTasks
from strop.environments.rewards import RewardFunction, RewardMark, to_number
from strop.extensions.adapters.runner_process import RunnerProcess, require_module
from strop.extensions.agents.agent_environment import AgentEnvironment, AgentFailed, AgentResult, current_result
from strop.extensions.agents.endpoint import Endpoint
from strop.types import Rollout, Task
from strop.user_code import suggest_names

SCORE, COMPONENT = "score", "component/"
AGENTS = ("simple_agent", "gymnasium_agent")
EFFORT = ("low_string", "low_weight", "low_ub", "low_penalty")
SAMPLING = ("temperature", "top_p")  # of a row, in whose place the run's are, as in NeMo-RL


@dataclass(frozen=True)
class ResourceServer:
    """Where the tools and the verifier of an agent are."""

    url: str
    agent: str = "simple_agent"  # the way that tasks are worked on
    max_steps: int | None = None  # requests to the policy


@dataclass(frozen=True, kw_only=True)
class NemoGymEnvironment(AgentEnvironment[Task]):
    """Rows of NeMo-Gym's data (``responses_create_params``, ``agent_ref``), worked on with the tools of its resource servers."""

    config: Mapping[str, Any] = field(
        default_factory=dict
    )  # NeMo-Gym's: config_paths, and what is set on top of those; starts the servers
    python: str = ""  # an interpreter that has nemo-gym, for config; "" for this one
    start_timeout_s: float = 1800.0  # until all servers are ready, their packages installed
    head_url: str = (
        ""  # in the place of config: of NeMo-Gym's head server, which knows where the others are, such as http://localhost:11000
    )
    servers: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # in the place of both: agent name -> url, agent, max_steps
    # Parts of the reward to be separate rewards (reward_components of /verify), for algorithms such as GDPO; () for their sum.
    components: tuple[str, ...] = ()
    timeout_s: float = 120.0  # for an answer of a server that runs separately
    # Of prompts that contain low_string, the reward r of a last turn of n tokens is r + r max(b, 0) + low_penalty min(b, 0), where
    # b = min(1, low_weight (1 - n / low_ub)), as in NeMo-RL.
    effort_levels: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(map(bool, (self.config, self.head_url, self.servers))) != 1:
            raise EnvironmentConfigError(
                "set config to start NeMo-Gym's servers, or head_url to the address of its head server, or servers to its resource servers"
            )
        if unknown := self.effort_levels.keys() - EFFORT:
            raise EnvironmentConfigError(f"effort_levels has no {', '.join(sorted(unknown))}; it has {', '.join(EFFORT)}")
        if self.config:
            if not self.config.get("config_paths"):
                raise EnvironmentConfigError("config.config_paths is not set; it lists NeMo-Gym's configuration files")
            return require_module(self.python, "nemo-gym", "nemo_gym")
        for name, server in self.resource_servers.items():
            if server.agent not in AGENTS:
                raise EnvironmentConfigError(
                    f"the agent {name} of NeMo-Gym is of the kind {server.agent!r}; of its agents, {' and '.join(AGENTS)} can be replaced. "
                    "Run another one as a command: type: agent"
                )

    @cached_property
    def resource_servers(self) -> Mapping[str, ResourceServer]:
        if self.servers:
            try:
                return {name: ResourceServer(**values) for name, values in self.servers.items()}
            except TypeError as error:
                raise EnvironmentConfigError(
                    f"servers maps the name of an agent to its url, agent and max_steps: {error}"
                ) from error
        return read_servers(self._fetch_global_config())

    @cached_property
    def process(self) -> RunnerProcess:
        process = RunnerProcess("nemo_gym_runner.py:NemoGymRunner", "nemo-gym", "nemo_gym", self.python)
        weakref.finalize(self, process.close)
        return process

    @cached_property
    def _agents(self) -> list[str]:
        """The names of the agents. The first to ask for them starts the servers."""
        agents: list[str] = self.process.load(self.start_timeout_s, config=dict(self.config))
        return agents

    @cached_property
    def _groups(self) -> Counter[tuple[str, int]]:
        return Counter()  # episodes of each task and sample so far

    def _fetch_global_config(self) -> Mapping[str, Any]:
        from ruamel.yaml import YAML

        try:
            with urllib.request.urlopen(f"{self.head_url.rstrip('/')}/global_config_dict_yaml", timeout=self.timeout_s) as answer:
                found: Mapping[str, Any] = YAML(typ="safe", pure=True).load(json.loads(answer.read()))
        except (OSError, ValueError) as error:
            raise EnvironmentConfigError(
                f"no head server of NeMo-Gym answers at {self.head_url} ({error}); start it (gym env start), or set head_url to where it is"
            ) from error
        return found

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        source = "the verifier of NeMo-Gym"
        if not self.components:
            return {SCORE: RewardFunction(partial(_score, self.effort_levels), RewardMark(accuracy=True), source)}
        return {name: RewardFunction(partial(_component, name), RewardMark(), source) for name in self.components}

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        return dict.fromkeys(options.get("components") or (SCORE,), RewardMark())

    def tasks(self, data: DataSource) -> Sequence[Task]:
        _, records = data.open_records()
        indices = data.select_records(range(len(records)), lambda: (json.dumps(record, default=str) for record in records))

        def make(index: int) -> Task:
            place = indices[index % len(indices)]
            row = records[place]
            if "responses_create_params" not in row:
                raise DataError(f"{records.name}, row {place + 1} has no responses_create_params; it is no data of NeMo-Gym")
            return Task(id=f"{records.name}:{place}", question=_last_text(row["responses_create_params"]), metadata=row)

        if self.config:
            self._check_agents(records[place] for place in indices)
        elif len(indices):
            self._server_of(make(0))
        return GeneratedTasks(len(indices) * data.repeat, make)

    def _check_agents(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Start the servers, and look for the agents of rows. A row without one has a ``task_source``, which leads NeMo-Gym to it."""
        known = {*self._agents, ""} if len(self._agents) == 1 else {*self._agents}
        for name in sorted({_agent_of(row) for row in rows if "task_source" not in row} - known):
            raise EnvironmentConfigError(
                f"rows are for the agent {name!r}, and config has {', '.join(self._agents)}{suggest_names(name, self._agents)}; add its "
                "file to config.config_paths"
            )

    def _server_of(self, task: Task) -> ResourceServer:
        servers = self.resource_servers
        name = _agent_of(task.metadata) or (next(iter(servers)) if len(servers) == 1 else "")
        if name not in servers:
            raise EnvironmentConfigError(
                f"task {task.id} is for the agent {name!r}, and there is a server for {', '.join(servers)}{suggest_names(name, servers)}"
            )
        return servers[name]

    async def run(self, task: Task, endpoint: Endpoint) -> AgentResult:
        if self.config:
            return await self._run_agent(task, endpoint)
        import aiohttp

        server = self._server_of(task)
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=limit) as session:
            episode = _NemoGymEpisode(task, server, endpoint, session)
            return await (episode.play() if server.agent == "gymnasium_agent" else episode.solve())

    async def _run_agent(self, task: Task, endpoint: Endpoint) -> AgentResult:
        """Let the agent of a row work on it. The rollouts of a group, which a server may compare, have an index in common."""
        agents = self._agents
        turn = self._groups[task.id, endpoint.sample]
        self._groups[task.id, endpoint.sample] += 1
        group = int.from_bytes(blake2b(f"{task.id}\n{turn}".encode(), digest_size=6).digest(), "big")
        given = task.metadata["responses_create_params"]
        params = {name: value for name, value in given.items() if name not in SAMPLING}
        only = {} if _agent_of(task.metadata) or "task_source" in task.metadata else {"agent_ref": {"name": agents[0]}}
        row = {
            **task.metadata,
            **only,
            "responses_create_params": params,
            "_ng_task_index": group,
            "_ng_rollout_index": endpoint.sample,
        }
        done = await self.process.call_async("run", row=row, base_url=endpoint.base_url, api_key=endpoint.api_key)
        if "failure" in done:
            raise RolloutFailed(f"NeMo-Gym's agent of task {task.id} failed: {done['failure']}", done["ending"])
        result = _read_verdict(done["result"])
        return replace(result, metrics={**{f"verify/{name}": value for name, value in done["metrics"].items()}, **result.metrics})


def read_servers(config: Mapping[str, Any]) -> dict[str, ResourceServer]:
    """Find the resource server of each agent in NeMo-Gym's global configuration."""
    found: dict[str, ResourceServer] = {}
    for name, section in config.items():
        agents = section.get("responses_api_agents") if isinstance(section, Mapping) else None
        for kind, agent in (agents or {}).items():
            wanted = (agent.get("resources_server") or {}).get("name")
            for resource in (config.get(str(wanted), {}).get("resources_servers") or {}).values():
                url = f"http://{resource['host']}:{resource['port']}"
                found[name] = ResourceServer(url, kind, agent.get("max_steps"))
    return found


class _NemoGymEpisode:
    """One task with a resource server."""

    def __init__(self, task: Task, server: ResourceServer, endpoint: Endpoint, session: Any) -> None:
        self._row, self._server, self._endpoint, self._session = dict(task.metadata), server, endpoint, session
        params = dict(self._row["responses_create_params"])
        given = params.get("input", [])
        params["input"] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        self._params = params
        self._outputs: list[Any] = []
        self._response: dict[str, Any] = {}

    async def solve(self) -> AgentResult:
        """Let the policy call tools until it calls none, and ask for the reward, as ``simple_agent`` does."""
        await self._post("/seed_session", self._row)
        step = 0
        while await self._ask_policy():
            step += 1
            calls = [item for item in self._response["output"] if item["type"] == "function_call"]
            if not calls or self._response.get("incomplete_details"):
                break
            for call in calls:
                self._outputs.append(
                    {"type": "function_call_output", "call_id": call["call_id"], "output": await self._call_tool(call)}
                )
            if self._server.max_steps and step >= self._server.max_steps:
                break
        answer = json.loads(await self._post("/verify", {**self._row, "response": {**self._response, "output": self._outputs}}))
        return _read_verdict(answer)

    async def play(self) -> AgentResult:
        """Let the policy act until the environment ends, as ``gymnasium_agent`` does."""
        opening = json.loads(await self._post("/reset", self._row))
        if opening.get("observation"):
            self._params["input"].append({"role": "user", "content": opening["observation"]})
        total, step = 0.0, 0
        while (self._server.max_steps is None or step < self._server.max_steps) and await self._ask_policy():
            step += 1
            answer = json.loads(await self._post("/step", {**self._row, "response": self._response}))
            total += answer.get("reward") or 0.0
            if answer.get("terminated") or answer.get("truncated"):
                break
            for tool in (answer.get("info") or {}).get("tool_outputs", []):
                self._outputs.append({"type": "function_call_output", **tool})
            if answer.get("observation"):
                self._outputs.append({"role": "user", "content": answer["observation"]})
        return AgentResult(reward=total, metrics={"steps": step})

    async def _ask_policy(self) -> bool:
        """Add what the policy says to the outputs. Returns whether it could: a conversation that is too long has ended."""
        body = {**self._params, "input": [*self._params["input"], *self._outputs], "model": self._endpoint.model}
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        async with self._session.post(f"{self._endpoint.base_url}/responses", json=body, headers=headers) as answer:
            if answer.status == 400 and self._outputs:
                return False
            if answer.status != 200:
                raise AgentFailed(f"the policy answered with status {answer.status}: {(await answer.text())[:500]}")
            self._response = await answer.json()
        self._outputs += self._response["output"]
        return True

    async def _call_tool(self, call: Mapping[str, Any]) -> str:
        """Return what a tool says, errors too: the policy reads them."""
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        if not str(call["name"]).replace("_", "").replace("-", "").isalnum() or call["name"] in ("verify", "seed_session"):
            return json.dumps({"error": f"there is no tool {call['name']!r:.80}"})
        return await self._post(f"/{call['name']}", arguments, fails=False)

    async def _post(self, path: str, body: Any, *, fails: bool = True) -> str:
        with failing_as(Ending.SERVICE):
            async with self._session.post(self._server.url.rstrip("/") + path, json=body) as answer:
                text: str = await answer.text()
        if fails and answer.status != 200:
            why = f"{self._server.url}{path} of NeMo-Gym answered with status {answer.status}: {text[:500]}"
            raise RolloutFailed(why, Ending.ERROR if self._outputs else Ending.SERVICE)  # what the policy wrote may be why
        return text


def _read_verdict(answer: Mapping[str, Any]) -> AgentResult:
    if answer.get("mask_sample"):
        reason = f"NeMo-Gym could not score the rollout: {answer.get('failure_kind')} {answer.get('failure_reason')}"
        return AgentResult(unscored=True, output=reason)
    if (value := to_number(answer.get("reward"))) is None:
        why = f"the verifier of NeMo-Gym gave the reward {answer.get('reward')!r:.80}, not a finite number"
        raise RolloutFailed(why, Ending.ERROR)
    parts = answer.get("reward_components") or {}
    return AgentResult(reward=value, metrics={f"{COMPONENT}{name}": float(part) for name, part in parts.items()})


def _score(effort: Mapping[str, Any], task: Task, rollout: Rollout) -> float | None:
    if current_result().unscored:
        return None
    reward: float = current_result().reward or 0.0
    text = effort.get("low_string")
    if not text or effort.get("low_weight", 0) <= 0 or text not in task.question:
        return reward
    length = 0 if rollout.last_turn is None else len(rollout.last_turn.tokens)
    bonus = min(1.0, float(effort["low_weight"]) * (1 - length / float(effort["low_ub"])))
    return reward + reward * max(bonus, 0.0) + float(effort["low_penalty"]) * min(bonus, 0.0)


def _component(name: str, task: Task, rollout: Rollout) -> float | None:
    result = current_result()
    if result.unscored:
        return None
    if result.reward is None:  # the conversation became too long
        return 0.0
    if (part := result.metrics.get(f"{COMPONENT}{name}")) is None:
        known = ", ".join(key.removeprefix(COMPONENT) for key in result.metrics if key.startswith(COMPONENT)) or "none"
        why = f"the verifier of NeMo-Gym gave no component {name!r} of the reward; it gave {known} (components)"
        raise RolloutFailed(why, Ending.ERROR)
    return part


def _agent_of(row: Mapping[str, Any]) -> str:
    return str((row.get("agent_ref") or {}).get("name") or "")


def _last_text(params: Mapping[str, Any]) -> str:
    given = params.get("input", "")
    texts = [given] if isinstance(given, str) else [item.get("content") for item in given if item.get("role") == "user"]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")

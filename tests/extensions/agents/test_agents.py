"""Agents that nobody wrote for Strop: LangChain, smolagents, curl, node; and how their episodes end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strop.base_config import validate_section
from strop.environments.base import EnvironmentConfigError
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import list_marks, make_environment
from strop.environments.resources import configure_resources, open_resources
from strop.extensions.agents.agent_environment import current_result, read_result
from strop.extensions.agents.endpoint import Endpoint
from strop.extensions.agents.external_agent import ExternalAgent, run_command_agent
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.runs.dry_run.examine import find_single_turns
from strop.tools.base import InfrastructureError
from strop.types import Ending, Rollout
from support.agents import TASK, Recorder, check_tree, play, play_async
from support.processes import is_alive, wait_until

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


def run_command(command: list[str], generator: Any = None, **options: Any) -> Rollout:
    return play(None, generator, environment={"command": command, **options})


def test_an_agent_of_langchain_is_stored_as_it_was_sampled() -> None:
    openai_chat = pytest.importorskip("langchain_openai").ChatOpenAI
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply."""
        return a * b

    generator = Recorder(f"I use it.{CALL % ('multiply', json.dumps({'a': 3, 'b': 4}))}", "the 12", "again 12")

    async def agent(task: Any, endpoint: Any) -> str:
        model = openai_chat(model="gpt-4o", base_url=endpoint.base_url, api_key=endpoint.api_key, temperature=0.1)
        messages: list[Any] = [HumanMessage("3*4?")]
        bound = model.bind_tools([multiply])
        for _ in range(2):
            reply = await bound.ainvoke(messages)
            messages.append(reply)
            messages += [ToolMessage(str(multiply.invoke(call)), tool_call_id=call["id"]) for call in reply.tool_calls]
        messages.append(HumanMessage("Again."))
        return "".join([chunk.content async for chunk in bound.astream(messages)])

    rollout = play(agent, generator)
    assert rollout.error is None and rollout.output == "again 12"
    check_tree(rollout, generator.sampled)
    assert not rollout.branches and rollout.metrics["gateway/requests"] == 3 and rollout.metrics["gateway/overridden"] == 3
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]


def test_an_agent_of_smolagents_is_stored_as_it_was_sampled() -> None:
    smolagents = pytest.importorskip("smolagents")
    generator = Recorder(
        "Thought: add\n" + CALL % ("add", json.dumps({"a": 12, "b": 34})), CALL % ("final_answer", json.dumps({"answer": "46"}))
    )

    def agent(task: Any, endpoint: Any) -> str:
        @smolagents.tool
        def add(a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: one
                b: the other
            """
            return a + b

        model = smolagents.OpenAIServerModel("gpt-4o", api_base=endpoint.base_url, api_key=endpoint.api_key)
        toolcaller = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
        return str(toolcaller.run("What is 12+34?"))

    rollout = play(agent, generator, max_length=20_000, max_new_tokens=400)
    assert rollout.error is None and rollout.output == "46"
    check_tree(rollout, generator.sampled)
    assert len(rollout.policy_turns) == 2  # it writes its history in its own way: a branch, counted
    assert rollout.metrics["gateway/rewritten"] == len(rollout.branches) == 1
    assert rollout.metrics["gateway/unenforced"] == 2  # it asks for tool_choice: required


CURL = """
read task
ask() { curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -H "Content-Type: application/json" -d "$1"; }
first=$(ask '{"messages": [{"role": "user", "content": "Hi"}]}')
text=$(echo "$first" | sed 's/.*"content": "\\([^"]*\\)".*/\\1/')
told='{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "'"$text"'"}'
ask '{"messages": ['"$told"', {"role": "user", "content": "So"}]}' >&2
echo '{"reward": 0.25, "metrics": {"steps": 2}}'
"""


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_an_agent_of_bash_and_curl_is_stored_as_it_was_sampled() -> None:
    generator = Recorder("the 12", "in")
    rollout = run_command(["bash", "-c", CURL], generator)
    assert rollout.error is None and rollout.reward == 0.25 and rollout.metrics["steps"] == 2
    check_tree(rollout, generator.sampled)
    assert not rollout.branches and len(rollout.turns) == 3 and "--- standard error" in rollout.output


NODE = """
const task = JSON.parse(require("fs").readFileSync(0, "utf8"));
async function ask(path, body) {
  const answer = await fetch(process.env.OPENAI_BASE_URL + path, {method: "POST", body: JSON.stringify(body),
    headers: {"Content-Type": "application/json", "Authorization": "Bearer " + process.env.OPENAI_API_KEY}});
  return answer;
}
(async () => {
  const messages = [{role: "user", content: task.question}];
  const streamed = await (await ask("/chat/completions", {messages, stream: true})).text();
  const chunks = streamed.split("\\n\\n").filter(x => x.startsWith("data: {")).map(x => JSON.parse(x.slice(6)));
  const content = chunks.map(chunk => chunk.choices[0].delta.content || "").join("");
  messages.push({role: "assistant", content}, {role: "user", content: "So?"});
  const last = await (await ask("/chat/completions", {messages})).json();
  console.log(JSON.stringify(last.choices[0].message.content == task.answer));
})();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_an_agent_in_javascript_is_stored_as_it_was_sampled(tmp_path: Path) -> None:
    (tmp_path / "agent.js").write_text(NODE)
    generator = Recorder("the 12", "3")
    rollout = run_command(["node", "agent.js"], generator, directory=str(tmp_path))
    assert rollout.error is None and rollout.reward == 1.0
    check_tree(rollout, generator.sampled)
    assert not rollout.branches and len(rollout.turns) == 3


ASK_ONCE = """
import json, os, sys, urllib.request
def ask(content="Hi"):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        return json.load(answer)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", ASK_ONCE + code]


def test_the_reward_of_a_command_is_its_last_line_its_exit_code_or_a_function() -> None:
    assert run_command(python("ask(); print('thinking'); print(0.5)")).reward == 0.5
    assert run_command(python("ask(); sys.exit(1)"), reward_from="exit_code").reward == 0.0
    assert run_command(python("ask()"), reward_from="exit_code").reward == 1.0
    assert "exit code 3: " in str(run_command(python("ask(); print('why', file=sys.stderr); sys.exit(3)")).error)
    assert "the agent returned no reward" in str(run_command(python("ask(); print('done')")).error)

    def printed(task: Any, rollout: Rollout) -> float:
        return float("done" in current_result().output and "done" in rollout.output)

    assert run_command(python("ask(); print('done')"), reward=printed).rewards == {"printed": 1.0}


def test_an_agent_that_gives_none_as_its_reward_has_a_rollout_that_cannot_be_scored() -> None:
    for printed, unscored in (
        ("{'reward': None}", True),
        ("{'reward': None, 'metrics': {'steps': 2}}", True),
        ("{'reward': 0}", False),
    ):
        rollout = run_command(python(f"ask(); print(json.dumps({printed}))"))
        assert rollout.error is None and (rollout.unscored, rollout.reward) == (unscored, 0.0), printed
    assert read_result({"reward": None}).unscored and not read_result(None).unscored and not read_result({"output": ""}).unscored


def test_a_command_cannot_be_started_or_takes_too_long(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match="command starts 'no-such-agent', but there is no such program here"):
        run_command(["no-such-agent"])
    broken = tmp_path / "agent"
    broken.write_text("#!/no/such/interpreter")
    broken.chmod(0o755)
    assert f"the agent {broken} cannot be started" in str(run_command([str(broken)]).error)
    begun = time.monotonic()
    rollout = run_command(["sleep", "60"], agent_timeout_s=0.2)
    assert "took longer than 0.2 s" in str(rollout.error) and time.monotonic() - begun < 20


def test_everything_that_a_command_started_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    started = f"sleep 300 & echo $! >> {pids}; trap '' TERM; sleep 301 & echo $! >> {pids};"
    rollout = run_command(["bash", "-c", f"{started} echo 1"])
    assert "without a completion" in str(rollout.error)
    run_command(["bash", "-c", f"{started} wait"], agent_timeout_s=0.3)
    assert len(pids.read_text().split()) == 4
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_a_cancelled_episode_ends_its_command_and_its_key(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def cancel() -> None:
        command = ["bash", "-c", f"echo $$ > {pid}; sleep 300"]
        task = asyncio.create_task(play_async(None, environment={"command": command}))
        while not pid.exists() or not pid.read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert not is_alive(int(pid.read_text()))


def test_commands_end_with_a_run_that_is_killed() -> None:
    run = """
import subprocess, sys, time
from strop.extensions.agents.agent_guardian import guard_group

ended, left = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
with guard_group(left.pid):
    with guard_group(ended.pid):
        pass
    print(ended.pid, left.pid, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ended, left = map(int, process.stdout.readline().split())
    process.kill()
    process.wait()
    assert wait_until(lambda: not is_alive(left)) and is_alive(ended)  # its guard had let it go
    os.kill(ended, signal.SIGKILL)


def test_functions_that_block_do_not_wait_for_each_other() -> None:
    def agent(task: Any, endpoint: Any) -> float:
        time.sleep(0.3)
        import urllib.request

        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)).read()
        return 1.0

    async def run() -> list[Rollout]:
        return await asyncio.gather(*(play_async(agent, environment={}) for _ in range(48)))

    begun = time.monotonic()
    rollouts = asyncio.run(run())
    assert [rollout.reward for rollout in rollouts] == [1.0] * 48 and time.monotonic() - begun < 6
    assert {rollout.ending for rollout in rollouts} == {Ending.STOP}


def test_the_configuration_says_what_an_agent_is() -> None:
    config = validate_section(EnvironmentConfig, {"command": ["node", "agent.js"]})
    assert config.type_of("mine") == "agent" and tuple(list_marks("agent", config.options)) == ("score",)
    assert isinstance(make_environment("agent", config.options), ExternalAgent)
    assert tuple(list_marks("agent", {"agent": "a.py:run", "rewards": {"short": len_reward}})) == ("short",)
    with pytest.raises(EnvironmentConfigError, match="set agent to a function"):
        make_environment("agent", {})
    with pytest.raises(EnvironmentConfigError, match="not both"):
        make_environment("agent", {"agent": f"{os.__name__}:getcwd", "command": ["x"]})


def len_reward(task: Any, rollout: Rollout) -> int:
    return len(rollout.text)


def test_a_command_that_is_cancelled_while_it_starts_is_ended_and_the_cancellation_comes_through() -> None:
    async def cancel_after(steps: int) -> None:
        endpoint = Endpoint(base_url="http://127.0.0.1:1/v1", api_key="k", model="m")
        command = ["sh", "-c", "sleep 30 & sleep 30"]
        running = asyncio.ensure_future(run_command_agent(command, TASK, endpoint, reward_from="stdout", directory=None))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)

    for steps in range(1, 9):
        asyncio.run(cancel_after(steps))


def test_an_agent_needs_more_than_one_turn() -> None:
    environments = {"agent": LocalEnvironment(ExternalAgent(agent=print))}
    (found,) = find_single_turns(environments, 1, "grpo")
    assert found.startswith("env.agent: ExternalAgent runs an agent") and "after the first is refused" in found
    assert not list(find_single_turns(environments, 2, "grpo"))


def test_a_run_with_agents_is_refused_without_the_package_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> list[str]:
        notes: list[str] = []
        async with open_resources([LocalEnvironment(ExternalAgent(agent=print))], notes.append):
            return notes

    configure_resources({"gateway": GatewayConfig(url="http://me:secret@gateway/v1")})
    assert asyncio.run(start()) == ["agents reach the policy at http://<redacted>@gateway/v1"]
    monkeypatch.setattr("strop.extensions.agents.agent_episode.packages.is_installed", lambda package: False)
    with pytest.raises(InfrastructureError, match=r"needs the package aiohttp: pip install -e '\.\[agents\]'"):
        asyncio.run(start())
    assert play(lambda task, endpoint: 1.0).ending == Ending.SERVICE

"""Harnesses as they are installed, against the real gateway: what docs/harnesses.md says each of them needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeGenerator, Request
from strop.types import Ending, Rollout
from support.adapter_servers import ADAPTERS, interpreter
from support.agents import END, TOKENIZER, Recorder, check_tree, ids, play

pytestmark = [pytest.mark.slow]

RESULT = "40 plus 6 is 46"
CALL = '<tool_call>{"name": "%s", "arguments": {"%s": "echo 40 plus 6 is $((40+6))"%s}}</tool_call>'


class Policy(Recorder):
    """Calls the shell, and answers once its output is there."""

    def __init__(self, call: str, answer: str = "The sum is 46.") -> None:
        super().__init__()
        self.call, self.answer = call, answer
        self.fake = FakeGenerator(TOKENIZER, self.reply)

    def reply(self, request: Request) -> tuple[list[int], bool]:
        done = RESULT in TOKENIZER.decode(request.prompt)
        return [*ids(self.answer if done else f"I add.{self.call}"), END], True


def run(command: list[str], policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> Rollout:
    """Run a harness with a home of its own, and check that it made one conversation of two turns, as they were sampled."""
    for name in list(os.environ):
        if name.startswith(("ANTHROPIC", "CLAUDE", "CODEX", "OPENAI")):
            monkeypatch.delenv(name)
    for name, value in {"HOME": str(folder), **environ}.items():
        monkeypatch.setenv(name, value)
    options: Any = {"command": command, "directory": str(folder), "reward": lambda task, rollout: 1.0, "agent_timeout_s": 200.0}
    rollout = play(None, policy, environment=options, max_length=400_000, max_new_tokens=500)
    assert rollout.error is None and rollout.ending is Ending.STOP, rollout.error
    check_tree(rollout, policy.sampled)
    assert len(policy.sampled) == 2 and not rollout.branches, rollout.metrics
    refused = ("rewritten", "unmatched", "normalized", "refused", "malformed_calls")
    assert not any(rollout.metrics[f"gateway/{name}"] for name in refused), rollout.metrics
    return rollout


def program(package: str, pattern: str, name: str) -> str:
    """Return a program that npm installed. Skips the test where there is none."""
    modules = Path(os.environ.get(ADAPTERS, "")) / "harnesses" / "node_modules"
    found = next(modules.glob(f"{package}/{pattern}"), None) if os.environ.get(ADAPTERS) else None
    path = str(found) if found else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: make test-adapters")
    return path


def test_claude_code_is_stored_as_it_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claude = program("@anthropic-ai", "claude-code-*/claude", "claude")
    policy = Policy(CALL % ("Bash", "command", ', "description": "add"'))
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    rollout = run([claude, "-p", "What is 40+6?", "--allowedTools", "Bash"], policy, tmp_path, monkeypatch, **quiet)
    assert "The sum is 46." in rollout.output and "x-anthropic-billing-header" not in rollout.messages[0].content


def test_codex_is_stored_as_it_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codex = program("@openai", "codex-*/vendor/*/bin/codex", "codex")
    (tmp_path / "codex").mkdir()
    provider = 'model_providers.strop={name="strop", base_url="$OPENAI_BASE_URL", env_key="OPENAI_API_KEY", wire_api="responses"}'
    script = (
        f'exec "$0" exec --skip-git-repo-check -s danger-full-access -m "$OPENAI_MODEL" -c model_provider=strop -c "{_quote(provider)}" '
        "-c 'web_search=\"disabled\"' 'What is 40+6?' </dev/null"
    )
    policy = Policy(CALL % ("exec_command", "cmd", ""))
    rollout = run(["sh", "-c", script, codex], policy, tmp_path, monkeypatch, CODEX_HOME=str(tmp_path / "codex"))
    assert "The sum is 46." in rollout.output


def _quote(text: str) -> str:
    return text.replace('"', '\\"')


MINI_SWE_AGENT = """
import os
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

options = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = LitellmModel(model_name="openai/policy", model_kwargs=options, cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(), system_template="You use bash.", instance_template="{{task}}")
print(agent.run("What is 40+6?")["exit_status"])
"""


def test_mini_swe_agent_is_stored_as_it_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter("harnesses")
    submit = '<tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}</tool_call>'
    policy = Policy(CALL % ("bash", "command", ""), submit)
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
    rollout = run([python, "-c", MINI_SWE_AGENT], policy, tmp_path, monkeypatch, **local)
    assert "Submitted" in rollout.output


LANGGRAPH = """
import os, subprocess
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

@tool
def shell(command: str) -> str:
    "Run a command."
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [shell])
print(agent.invoke({"messages": [("user", "What is 40+6?")]})["messages"][-1].content)
"""


def test_langgraph_is_stored_as_it_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter("harnesses")
    policy = Policy(CALL % ("shell", "command", ""))
    assert "The sum is 46." in run([python, "-W", "ignore", "-c", LANGGRAPH], policy, tmp_path, monkeypatch).output


OPENHANDS = """
import os
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

model = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], usage_id="agent")
conversation = Conversation(agent=Agent(llm=model, tools=[Tool(name=TerminalTool.name)]), workspace=os.getcwd(), visualizer=None)
conversation.send_message("What is 40+6?")
conversation.run()
print(conversation.state.execution_status)
"""


def test_openhands_is_stored_as_it_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs Python 3.12: an environment STROP_ADAPTERS/openhands with openhands-sdk and openhands-tools, which make does not make."""
    python = interpreter("openhands")
    policy = Policy(CALL % ("terminal", "command", ', "security_risk": "LOW", "summary": "add"'))
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
    rollout = run([python, "-c", OPENHANDS], policy, tmp_path, monkeypatch, **local)
    assert "finished" in rollout.output.lower()

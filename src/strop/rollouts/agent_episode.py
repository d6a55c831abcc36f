"""Episodes that an agent drives: it asks the policy through the gateway, and its requests become the rollout."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from strop import packages
from strop.base_config import validate_section
from strop.endings import Ending, failing_as
from strop.environments.handle import EnvironmentHandle
from strop.gateway.gateway_config import GatewayConfig
from strop.generation.base import Generator
from strop.models.chat_template import ChatTemplate
from strop.packages import install_command
from strop.rollouts.tool_turns import ToolTurns
from strop.sampling import Sampling
from strop.tools.toolbox import ToolOffer
from strop.types import Rollout

log = logging.getLogger(__name__)


class AgentMadeNoRequest(RuntimeError):
    """An agent ended without a request that the policy answered."""


async def run_agent(
    environment: EnvironmentHandle[Any],
    rollout: Rollout,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    *,
    config: GatewayConfig | None,
    tool_call_format: str | None,
    max_turns: int,
    max_length: int,
) -> tuple[Rollout, Exception | None]:
    """Run the agent of a rollout. Returns the rollout with what the policy wrote, and how the agent failed.

    An exception caused by a refused request is no failure: the rollout is then truncated. One that reports no cause is a crash of the
    agent, which the policy drives.
    """
    if not packages.is_installed("aiohttp"):
        raise ImportError(
            f"{environment.traits.title} needs the gateway, and that the package aiohttp: {install_command('serve')}"
        )
    from strop.gateway.agent_session import AgentSession
    from strop.gateway.gateway import get_gateway

    config = config or validate_section(GatewayConfig, {})
    session = AgentSession(
        rollout=rollout,
        generator=generator,
        template=template,
        sampling=sampling,
        config=config,
        offer_tools=lambda tools: ToolTurns.make(ToolOffer(tuple(tools), "turn"), template, tool_call_format),
        max_turns=max_turns,
        max_length=max_length,
    )
    result, failure = None, None
    async with get_gateway(config).open(session) as endpoint:
        try:
            with failing_as(Ending.CRASH):
                result = await environment.run_agent(rollout.task, endpoint)
        except Exception as error:
            log.debug("the agent of task %s failed", rollout.task.id, exc_info=error)
            failure = error
    if session.failure is not None:
        raise session.failure
    if not session.exchanges:
        raise failure or AgentMadeNoRequest(session.prompt_error or _explain(environment, rollout))
    finished = session.make_rollout()
    if result is None:
        return finished, None if session.truncated else failure
    finished.metrics.update(result.metrics)
    return replace(finished, output=result.output, ending=finished.ending or Ending.STOP), None


def _explain(environment: EnvironmentHandle[Any], rollout: Rollout) -> str:
    return (
        f"the agent of {environment.traits.title} ended on task {rollout.task.id!r} without a completion: let it send its requests to "
        "endpoint.base_url with endpoint.api_key (OPENAI_BASE_URL and OPENAI_API_KEY of a command)"
    )

"""Episodes that an agent drives: it asks the policy through the gateway, and its requests become the rollout."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strop import packages
from strop.endings import Ending, failing_as
from strop.environments.handle import EnvironmentHandle
from strop.environments.resources import find_section
from strop.extensions.agents.episode_budget import EpisodeBudget
from strop.extensions.agents.gateway.agent_session import SessionOptions
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.generation.base import Generator
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules
from strop.safety.printable import redact_text
from strop.sampling import Sampling
from strop.tools.base import InfrastructureError
from strop.types import Rollout

if TYPE_CHECKING:
    from strop.extensions.agents.gateway.gateway import Gateway

log = logging.getLogger(__name__)


class AgentMadeNoRequest(RuntimeError):
    """An agent ended without a request that the policy answered."""


@asynccontextmanager
async def open_gateway() -> AsyncIterator[str]:
    """Check that a run can serve agents. It listens while an episode is open. Raises InfrastructureError."""
    gateway = _find_gateway()
    async with gateway.held():
        yield f"agents reach the policy at {redact_text(gateway.config.url or gateway.config.host)}"


def _find_gateway() -> Gateway:
    """Return the gateway as the run configures it. Raises InfrastructureError."""
    if not packages.is_installed("aiohttp"):
        raise InfrastructureError(
            f"agents reach the policy through the gateway, which needs the package aiohttp: {packages.install_command('agents')}"
        )
    from strop.extensions.agents.gateway.gateway import get_gateway

    return get_gateway(find_section(GatewayConfig))


async def run_agent(
    environment: EnvironmentHandle[Any],
    rollout: Rollout,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
) -> tuple[Rollout, Exception | None]:
    """Run the agent of a rollout. Returns the rollout with what the policy wrote, and how the agent failed.

    An exception caused by a refused request is no failure: the rollout is then truncated. One that reports no cause is a crash of the
    agent, which the policy drives.
    """
    options = SessionOptions(
        seed=rollout.seed,
        sample=rollout.sample,
        sampling=sampling,
        max_turns=rules.max_turns,
        max_length=rules.max_length,
        tool_call_format=rules.tool_call_format,
        budget=environment.traits.episode_limits or EpisodeBudget(),
    )
    result, failure = None, None
    async with _find_gateway().open(rollout, options, generator, template) as opened:
        try:
            with failing_as(Ending.CRASH):
                result = await environment.run_agent(rollout.task, opened.endpoint)
        except Exception as error:
            log.debug("the agent of task %s failed", rollout.task.id, exc_info=error)
            failure = error
    outcome, finished = opened.outcome, opened.outcome.rollout
    if outcome.failure is not None:
        raise outcome.failure
    if finished is None:
        raise failure or AgentMadeNoRequest(outcome.prompt_error or _explain(environment, rollout))
    if result is None:
        return finished, None if outcome.truncated else failure
    finished.metrics.update(result.metrics)
    return replace(finished, output=result.output, ending=finished.ending or Ending.STOP), None


def _explain(environment: EnvironmentHandle[Any], rollout: Rollout) -> str:
    return (
        f"the agent of {environment.traits.title} ended on task {rollout.task.id!r} without a completion: let it send its requests to "
        "endpoint.base_url with endpoint.api_key (OPENAI_BASE_URL and OPENAI_API_KEY of a command, or Anthropic's)"
    )

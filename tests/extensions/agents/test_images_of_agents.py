"""Images that agents send with each API: as the engine reads them, in the tree, and in the batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strop.base_config import validate_section
from strop.data.packing import pack
from strop.extensions.agents.gateway.agent_session import AgentSession, SessionOptions
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.extensions.agents.gateway.messages_api import make_chat_body as read_messages_body
from strop.extensions.agents.gateway.responses_api import make_chat_body as read_responses_body
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.safety.site_guard import BadRequest
from strop.sampling import Sampling
from strop.types import PromptImage, Rollout
from support.agents import EMPTY_ROLLOUT, SEED, check_tree
from support.rollouts import make_group
from support.vision_models import as_data_url, draw_image
from support.vision_rollouts import make_vision_processor, policy_turn


class Seer:
    """Answers, and keeps what it read."""

    version = 0

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.sampled: list[tuple[list[int], Completion]] = []
        self.seen: list[tuple[PromptImage, ...]] = []

    async def generate(self, prompt: Any, *, images: Any = (), **options: Any) -> Completion:
        turn = policy_turn([*self.template.tokenizer("ok")["input_ids"], self.template.tokenizer.eos_token_id])
        completion = Completion(tokens=turn.tokens, logprobs=turn.logprobs, versions=turn.versions, text="ok", stopped=True)
        self.sampled.append((list(prompt), completion))
        self.seen.append(tuple(images))
        return completion

    async def close(self) -> None: ...


def openai_image(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_data_url(content)}}


def anthropic_image(content: bytes) -> dict[str, Any]:
    kind, _, data = as_data_url(content).removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def reply(content: str = "ok") -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def play(*bodies: Any) -> tuple[Rollout, Seer]:
    """Send requests to a session, as chat completions."""
    template = ChatTemplate(make_vision_processor("qwen2_5_vl").tokenizer, vision=make_vision_processor("qwen2_5_vl"))
    seer = Seer(template)
    options = SessionOptions(seed=SEED, sample=0, sampling=Sampling(max_new_tokens=8), max_turns=9, max_length=4000)
    session = AgentSession(options=options, generator=seer, template=template, config=validate_section(GatewayConfig, {}))

    async def run() -> None:
        for body in bodies:
            session.count_request()
            await session.complete(*session.read(body, is_chat=True))

    asyncio.run(run())
    rollout = session.finish(EMPTY_ROLLOUT).rollout
    assert rollout is not None
    check_tree(rollout, seer.sampled)
    return rollout, seer


def check_images(rollout: Rollout, seer: Seer, contents: list[bytes]) -> None:
    """Check that the main path has these images where the engine read them, and so has the batch."""
    assert [image.content for image in rollout.path_images] == contents
    assert rollout.path_images == seer.seen[-1]
    batch = pack([make_group(rollout)])
    assert [image.content for image in batch.images] == contents
    place = seer.template.vision.image_token_id  # type: ignore[union-attr]
    for image in batch.images:
        assert (batch.tokens[image.start : image.end] == place).all()


def test_images_of_a_user_and_of_a_tool_are_read_where_they_stand() -> None:
    first, second = draw_image(1), draw_image(2, 90, 58)
    asked = {"role": "user", "content": [text("look "), openai_image(first), text(" here")]}
    shown = {"role": "user", "content": [text("and "), openai_image(second)]}
    check_images(*play({"messages": [asked]}, {"messages": [asked, reply(), shown]}), [first, second])
    blocks = {"role": "user", "content": [text("look "), anthropic_image(first)]}
    more = {"role": "user", "content": [anthropic_image(second)]}
    bodies = [{"max_tokens": 9, "messages": each} for each in ([blocks], [blocks, reply(), more])]
    check_images(*play(*map(read_messages_body, bodies)), [first, second])
    item = {"role": "user", "content": [{"type": "input_image", "image_url": as_data_url(first)}]}
    check_images(*play(read_responses_body({"input": [item]}, {})), [first])


def test_two_images_with_equal_tokens_are_two_branches() -> None:
    one, other = draw_image(1), draw_image(2)
    bodies = [{"messages": [{"role": "user", "content": [text("look "), openai_image(each)]}]} for each in (one, other)]
    rollout, seer = play(*bodies)
    assert seer.sampled[0][0] == seer.sampled[1][0] and len(rollout.branches) == 1
    batch = pack([make_group(rollout)])
    assert sorted(image.content for image in batch.images) == sorted([one, other])


def test_a_retry_of_a_request_with_an_image_shares_it() -> None:
    body = {"messages": [{"role": "user", "content": [text("look "), openai_image(draw_image(1))]}]}
    rollout, _ = play(body, body)
    assert rollout.metrics["gateway/retries"] >= 1 and len(rollout.branches) == 1
    assert len(pack([make_group(rollout)]).images) == 1


@pytest.mark.parametrize("data", ["AAAA", "!", ""])
def test_an_image_that_cannot_be_read_is_the_agents_error(data: str) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    with pytest.raises(BadRequest, match="the chat template does not accept these messages: ImageError"):
        play({"messages": [{"role": "user", "content": [image]}]})

"""A simulated user with its own goal, which the policy has to find out by asking: a script, or a language model at an endpoint.

{"persona": "in a hurry", "opening": "I need a flight.", "goal": "Lisbon", "replies": {"where|destination": "To Lisbon."}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.extensions.games.text_game import read_tag
from strop.extensions.judges.llm_client import LlmClient, get_llm_client
from strop.extensions.judges.llm_endpoint import make_endpoint
from strop.sampling import mix_seed
from strop.types import Message, Messages, Rollout, assistant, system, user

STOP = "</answer>"


@dataclass(frozen=True, kw_only=True)
class UserSimulator(DatasetEnvironment):
    """Rows of a dataset: what the user says first is the prompt, its goal the reference answer (``data.input_key``, ``data.output_key``).

    The policy asks, and ends the episode with ``<answer>...</answer>``. Without ``endpoint`` the column ``replies`` is the script: a
    mapping from a regular expression, which is searched for in the question, to what the user says; the first one that is found counts.
    """

    endpoint: Mapping[str, Any] = field(default_factory=dict)  # base_url, model and limits of the user's language model
    persona_key: str = "persona"  # column: who the user is
    replies_key: str = "replies"  # column: the script
    otherwise: str = "I don't know."  # what a script says to anything else
    max_tokens: int = 128  # of a language model's reply
    ignore_case: bool = True
    max_characters: ClassVar[int] = 20_000  # of a question, that a script reads

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint:
            make_endpoint(self.endpoint)

    @property
    def _client(self) -> LlmClient:
        return get_llm_client(make_endpoint(self.endpoint))

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        tasks = super().tasks(data)
        if not self.endpoint and len(tasks):
            self._script(tasks[0])  # a script that cannot be read is an error now, not in each rollout
        return tasks

    def prompt(self, task: PromptedTask) -> Messages:
        asked = (
            "Find out what the user wants. Ask one question at a time; when you know, answer with <answer>what it is</answer>."
        )
        if any(message.role == "system" for message in task.messages):
            return task.messages
        return (system(asked), *task.messages)

    def stop_strings(self, task: PromptedTask, rollout: Rollout) -> Sequence[str]:
        return (STOP,)

    async def respond(self, task: PromptedTask, rollout: Rollout) -> Messages | None:
        if read_tag(rollout.content, "answer") is not None:
            return None
        return (user(await self._ask_model(task, rollout) if self.endpoint else self._follow_script(task, rollout.content)),)

    def _script(self, task: PromptedTask) -> list[tuple[re.Pattern[str], str]]:
        replies = task.metadata.get(self.replies_key)
        if not isinstance(replies, Mapping):
            raise EnvironmentConfigError(
                f"task {task.id!r} has {replies!r:.80} in the column {self.replies_key}; a script is a mapping from regular expressions to "
                "replies. Set replies_key to its column, or endpoint to a language model that plays the user"
            )
        try:
            return [(re.compile(str(pattern), re.IGNORECASE), str(reply)) for pattern, reply in replies.items()]
        except re.error as error:
            raise EnvironmentConfigError(
                f"task {task.id!r} has a script with the regular expression {error.pattern!r}: {error}"
            ) from None

    def _follow_script(self, task: PromptedTask, question: str) -> str:
        shortened = question[: self.max_characters]
        return next((reply for pattern, reply in self._script(task) if pattern.search(shortened)), self.otherwise)

    async def _ask_model(self, task: PromptedTask, rollout: Rollout) -> str:
        """Let the language model speak as the user: what the policy says is the other side of its conversation."""
        persona = str(task.metadata.get(self.persona_key) or "an ordinary user")
        told = (
            f"You play a user who talks to an assistant. You are: {persona}. What you want: {task.answer}. Never say it outright before "
            "you are asked; answer the question that you are asked, in one or two sentences, and stay in your role."
        )
        spoken = [message for message in rollout.messages if message.role != "system"]
        turned = [assistant(message.content) if message.role == "user" else user(message.content) for message in spoken]
        opening: list[Message] = [system(told), user("(The assistant is listening.)")]
        seed = mix_seed(rollout.seed, len(rollout.policy_turns)) % 2**31
        reply = await self._client.complete(
            [*opening, *turned], temperature=0.7, max_tokens=self.max_tokens, seed=seed, sample=seed
        )
        return reply.text

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        found = read_tag(rollout.content, "answer")
        return None if found is None else self._normal(found)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()).rstrip(".")
        return text.lower() if self.ignore_case else text

    @reward(weight=1.0, accuracy=True)
    def understood(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.answer_key(task, rollout) == self._normal(task.answer)

    @reward(weight=0.0)
    def questions(self, task: PromptedTask, rollout: Rollout) -> int:
        return sum(read_tag(turn.content, "answer") is None for turn in rollout.policy_turns)

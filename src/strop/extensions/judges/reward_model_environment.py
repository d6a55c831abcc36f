"""The score of a trained reward model as the reward: rows of a dataset, scored by a sequence classifier with one label.

The reward model's own chat template and tokenizer render the whole conversation. They may differ from the policy's, because
these tokens are not trained on.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strop import gpus
from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.environments.verifiers.base import Reply, Verifier
from strop.lazy_torch import torch
from strop.models.tokenizer_config import read_chat_template
from strop.packages import install_command, is_installed
from strop.types import Messages, Rollout, Task

if TYPE_CHECKING:
    from strop.extensions.judges.reward_scorer import RewardScorer, ScorerLimits
    from strop.models.chat_template import ChatTemplate


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RatingModel:
    """The score of a whole conversation, times ``scale``, clamped to ``min_score`` and ``max_score``."""

    model_name: str  # a folder, such as policy/weights of strop rm, or a hub name
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto is a GPU if one is visible
    device_map: str | dict[str, int | str] | None = None  # balanced: layers over all GPUs; or module name -> device
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    chat_template: str | None = None  # Jinja template or a file with one, instead of the tokenizer's
    ends: Literal["answer", "rendering"] = "answer"  # read the score before or after the template's trailing white space
    max_length: int | None = None  # tokens; longer conversations are truncated on the left. None: the model's maximum
    batch_size: int = 32  # conversations of one batch
    batch_tokens: int = 16384  # tokens of one batch, including padding
    wait_ms: float = 5.0  # how long the first conversation of a batch waits for others
    scale: float = 1.0
    min_score: float | None = None
    max_score: float | None = None

    def check_options(self) -> None:
        """Raise EnvironmentConfigError for options that cannot work."""
        for name in ("batch_size", "batch_tokens", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise EnvironmentConfigError(f"{name} is {value}; it must be at least 1")
        if self.wait_ms < 0:
            raise EnvironmentConfigError(f"wait_ms is {self.wait_ms}; it must not be negative")
        try:
            read_chat_template(self.chat_template)
        except ValueError as error:
            raise EnvironmentConfigError(f"chat_template is {self.chat_template!r:.300}; {error}") from error
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise EnvironmentConfigError(
                f"min_score is {self.min_score} and max_score is {self.max_score}; max_score must be larger"
            )
        if self.device_map is not None:
            self._check_device_map()

    def _check_device_map(self) -> None:
        if isinstance(self.device_map, str) and self.device_map != "balanced":
            raise EnvironmentConfigError(
                f"device_map is {self.device_map!r}; set it to balanced, or to a mapping of the names of modules to devices"
            )
        if self.device != "auto":
            raise EnvironmentConfigError(f"device is {self.device} and device_map is set too; leave device out")
        if not is_installed("accelerate"):
            raise EnvironmentConfigError(f"device_map needs the package accelerate: {install_command('verifiers')}")

    async def rate(self, messages: Messages) -> float:
        """Return the score of a conversation."""
        scorer = await asyncio.to_thread(self.load_scorer)  # slow at the first call in a process that did not create tasks
        value = self.scale * await scorer.score(messages, ends=self.ends, max_length=self.max_length)
        value = value if self.min_score is None else max(value, self.min_score)
        return value if self.max_score is None else min(value, self.max_score)

    def load_scorer(self) -> ConversationScorer:
        """Return the model, loaded once per process. Raises EnvironmentConfigError."""
        from strop.extensions.judges.reward_scorer import ScorerLimits

        limits = ScorerLimits(conversations=self.batch_size, tokens=self.batch_tokens, wait=self.wait_ms / 1000)
        with _load_lock:
            return _load_scorer(
                self.model_name, self.chat_template, self.device, json.dumps(self.device_map), self.precision, limits
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelEnvironment(RatingModel, DatasetEnvironment):
    """The reward is the model's score of the whole conversation, times ``scale``, clamped to ``min_score`` and ``max_score``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options()

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        """Load the model too, so that a wrong one raises EnvironmentConfigError at the start of the run."""
        self.load_scorer()
        return super().tasks(data)

    @reward(weight=1.0)
    async def score(self, task: PromptedTask, rollout: Rollout) -> float:
        return await self.rate(rollout.messages)


class ConversationScorer:
    """A reward model with its template and tokenizer."""

    def __init__(self, scorer: RewardScorer, template: ChatTemplate) -> None:
        self.scorer = scorer
        self.template = template
        config = scorer.model.config.get_text_config()
        self._max_length = getattr(config, "max_position_embeddings", None)
        self._warned = False

    async def score(self, messages: Messages, *, ends: Literal["answer", "rendering"], max_length: int | None) -> float:
        tokens = self.template.encode_conversation(messages, trailing=ends == "rendering")
        limit = max_length or self._max_length
        if limit is not None and len(tokens) > limit:
            if not self._warned:
                self._warned = True
                log.warning(
                    "the reward model reads at most %d tokens, and a conversation has %d: it is truncated on the left",
                    limit,
                    len(tokens),
                )
            tokens = tokens[-limit:]
        return await self.scorer.score(tokens)


_load_lock = threading.Lock()


@functools.cache
def _load_scorer(
    name: str, chat_template: str | None, device: str, device_map: str, precision: str, limits: ScorerLimits
) -> ConversationScorer:
    from strop.extensions.judges.reward_scorer import load_reward_scorer
    from strop.models.chat_template import ChatTemplate
    from strop.models.loading import ModelNotFound, load_tokenizer

    resolved = (gpus.KIND if gpus.has_gpu() else "cpu") if device == "auto" else device
    try:
        tokenizer = load_tokenizer(name, chat_template=chat_template)
        placed = json.loads(device_map)
        scorer = load_reward_scorer(name, device=resolved, device_map=placed, precision=getattr(torch, precision), limits=limits)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a missing device
        message = str(error).replace("policy.model_name", "model_name")
        raise EnvironmentConfigError(message if isinstance(error, ModelNotFound) else f"the reward model: {message}") from error
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        log.warning("the reward model %s has no chat template: messages are joined as plain text; set chat_template", name)
    return ConversationScorer(scorer, ChatTemplate(tokenizer))


@dataclass(frozen=True, kw_only=True)
class RewardModelVerifier(RatingModel, Verifier):
    """The score of the conversation up to the end of the reply. Rewards with the same model share it."""

    def __post_init__(self) -> None:
        self.check_options()

    def prepare(self) -> None:
        self.load_scorer()

    async def score(self, task: Task, reply: Reply) -> float:
        return await self.rate(reply.messages)

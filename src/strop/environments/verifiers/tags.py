"""Tags in order, each exactly once: ``<think>...</think>`` then ``<answer>...</answer>``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.verifiers.base import Reply, Verifier
from strop.types import Task

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class TagsVerifier(Verifier):
    """1 if the reply has these elements once each, in this order and not nested; otherwise 0, or the share of them it has."""

    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = (
        False  # the prompt ends inside the first element, whose content begins the reply (detected for a template's thoughts)
    )
    only: bool = True  # only white space outside of the elements
    filled: bool = True  # each contains more than white space
    credit: Literal["all", "each"] = "all"  # each: the share of correct tags, with ``only`` as one more

    def __post_init__(self) -> None:
        if not self.tags or len(set(self.tags)) < len(self.tags) or not all(_NAME.fullmatch(tag) for tag in self.tags):
            raise EnvironmentConfigError(f"tags is {list(self.tags)}; set it to different names of elements, without < and >")

    def score(self, task: Task, reply: Reply) -> float:
        text = f"<{self.tags[0]}>{reply.text}" if self.opened else reply.opening + reply.text
        right, position, outside = 0, 0, ""
        for tag in self.tags:
            begin, end = text.find(f"<{tag}>", position), text.find(f"</{tag}>", position)
            once = text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>")
            if not once or not 0 <= begin < end:
                continue
            if self.filled and not text[begin + len(tag) + 2 : end].strip():
                continue
            right += 1
            outside += text[position:begin]
            position = end + len(tag) + 3
        alone = right == len(self.tags) and not (outside + text[position:]).strip()
        if self.credit == "all":
            return float(right == len(self.tags) and (alone or not self.only))
        return (right + alone) / (len(self.tags) + 1) if self.only else right / len(self.tags)

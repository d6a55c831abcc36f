"""Where a language model is asked over HTTP, and within which limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from strop.environments.base import EnvironmentConfigError
from strop.user_code import suggest_names

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class LlmEndpoint:
    """An OpenAI-compatible endpoint (``POST base_url/chat/completions``) and a model that it serves."""

    base_url: str  # such as http://127.0.0.1:8000/v1
    model: str
    api_key_env: str | None = None  # the environment variable that holds the key; the key itself is never in a configuration
    concurrency: int = 16  # requests in flight, in one process
    requests_per_minute: float | None = None  # in one process; None: no limit
    tokens_per_minute: float | None = None  # prompt and completion
    timeout_s: float = 120.0  # of one attempt
    max_retries: int = 5  # after the first attempt; of what may pass: connections, timeouts, 408, 409, 425, 429 and 5xx
    max_backoff_s: float = 60.0  # the longest wait before a retry; a server that asks for a longer one has failed
    cache: Literal["memory", "disk", "off"] = "memory"
    cache_dir: str | None = None  # of cache=disk; processes and runs may share it
    cache_size: int = 10_000  # replies in memory
    input_price: float = 0.0  # of a million prompt tokens
    output_price: float = 0.0  # of a million completion tokens
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # more fields of each request, such as {"top_k": 1}

    def __post_init__(self) -> None:
        if not isinstance(self.base_url, str) or not self.base_url.startswith(("http://", "https://")):
            raise EnvironmentConfigError(
                f"base_url is {self.base_url!r}; set it to the address of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1"
            )
        if not isinstance(self.model, str) or not self.model:
            raise EnvironmentConfigError(f"model is {self.model!r}; set it to the name of a model that {self.base_url} serves")
        if self.api_key_env is not None and not _VARIABLE.fullmatch(str(self.api_key_env)):
            raise EnvironmentConfigError(  # what stands here may be the key itself: do not show it
                "api_key_env is not the name of an environment variable; put the key into a variable and set api_key_env to its name"
            )
        self._check_numbers()
        if (self.cache == "disk") != (self.cache_dir is not None):
            raise EnvironmentConfigError(
                f"cache is {self.cache} and cache_dir is {self.cache_dir}; set cache to disk and cache_dir to a folder, or neither"
            )
        if self.cache not in ("memory", "disk", "off"):
            raise EnvironmentConfigError(f"cache is {self.cache!r}; set it to memory, disk or off")
        if not isinstance(self.extra_body, Mapping):
            raise EnvironmentConfigError(f"extra_body is {self.extra_body!r:.80}; set it to a mapping of fields of the request")

    def _check_numbers(self) -> None:
        for name, least in (("concurrency", 1), ("max_retries", 0), ("cache_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise EnvironmentConfigError(f"{name} is {value!r}; set it to a whole number of at least {least}")
        for name in ("timeout_s", "max_backoff_s", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise EnvironmentConfigError(f"{name} is {value!r}; set it to a positive number")
        for name in ("input_price", "output_price"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise EnvironmentConfigError(f"{name} is {value!r}; set it to the price of a million tokens, 0 or more")

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input_price + output_tokens * self.output_price) / 1e6


ENDPOINT_OPTIONS = tuple(each.name for each in fields(LlmEndpoint))


def make_endpoint(options: Mapping[str, Any]) -> LlmEndpoint:
    """Make an endpoint from a section of a configuration. Raises EnvironmentConfigError, also for options that it does not have."""
    for name in options:
        if name not in ENDPOINT_OPTIONS:
            raise EnvironmentConfigError(f"an endpoint has no option {name!r}{suggest_names(str(name), ENDPOINT_OPTIONS)}")
    for name in ("base_url", "model"):
        if name not in options:
            raise EnvironmentConfigError(f"the endpoint of a language model needs {name}; set it")
    return LlmEndpoint(**options)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""The trained policy as a client for environments, for the other side of a game that it plays against itself.

    with serve_policy(client): ...          around an episode, by the code that runs it (``strop.rollouts.episode``)
    await get_policy().complete(messages)   in the environment

Text sampled this way is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from strop.types import Messages

BASE = "base"  # name of the policy as it was before the run


@dataclass(frozen=True, kw_only=True)
class PastSelvesRule:
    """Which earlier selves of the policy a run keeps."""

    snapshot_every: int  # steps
    pool_size: int  # number of snapshots; the oldest is dropped first


class PolicyClient(Protocol):
    @property
    def version(self) -> int:
        """The version of its weights: the step after which they were published."""
        ...

    def past(self, share: float) -> PolicyClient:
        """Return an earlier self in the given share of groups, the same one for all rollouts of a group, and itself in the
        others.

        Raises NoPolicyError if none are kept."""
        ...

    def named(self, name: str) -> PolicyClient:
        """Return a policy of a role (``Environment.policies``), or BASE. Raises NoPolicyError if the run has none of this name."""
        ...

    async def complete(self, messages: Messages, *, seed: int, stop_strings: Sequence[str] = ()) -> str:
        """Return the policy's next message in a conversation, sampled as in the episode."""
        ...


class NoPolicyError(RuntimeError):
    """An environment requested the policy where there is none."""


_policy: ContextVar[PolicyClient | None] = ContextVar("strop_policy", default=None)


@contextmanager
def serve_policy(client: PolicyClient) -> Iterator[None]:
    """Make ``get_policy`` return ``client`` in this context, and in tasks that are created in it."""
    token = _policy.set(client)
    try:
        yield
    finally:
        _policy.reset(token)


def get_policy() -> PolicyClient:
    """Return the policy of the episode. Raises NoPolicyError outside of one."""
    if (client := _policy.get()) is None:
        raise NoPolicyError(
            "this environment plays against the policy itself, which exists only in the sampling process; set cluster.environment_hosts "
            "to 0, or let it play against a served model (opponent: endpoint)"
        )
    return client

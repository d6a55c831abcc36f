"""Episodes whose turns depend on what earlier ones left in a sandbox, and a run that dies in the middle of them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from loop.killing import die
from strop.data.sources.source import DataSource
from strop.environments.base import GeneratedTasks, PromptedTask, reward
from strop.extensions.sandboxes.base import SandboxCommand
from strop.extensions.sandboxes.task_sandbox import InSandbox, current_sandbox
from strop.types import Messages, Rollout, user


@dataclass(frozen=True, kw_only=True)
class Growing(InSandbox):
    """Each turn is appended to a file; the policy reads how large that is now."""

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        return GeneratedTasks(100, lambda index: PromptedTask(id=str(index), messages=(user(f"{index % 10}"),)))

    def stop_strings(self, task: PromptedTask, rollout: Rollout) -> Sequence[str]:
        return [*string.ascii_letters, *string.digits, *string.punctuation]

    async def respond(self, task: PromptedTask, rollout: Rollout) -> Messages | None:
        sandbox = await current_sandbox().open()
        command = SandboxCommand(argv=("sh", "-c", "cat >>/grown; stat -c %s /grown"), stdin=b"+" + rollout.text.encode())
        size = (await sandbox.exec(command)).text.strip()
        return None if len(rollout.policy_turns) == 3 else (user(size),)

    @reward(accuracy=True)
    async def share_of_digits(self, task: PromptedTask, rollout: Rollout) -> float:
        sandbox = await current_sandbox().open()
        content = (await sandbox.exec(SandboxCommand(argv=("cat", "/grown")))).text
        return sum(letter.isdigit() for letter in content) / 10 + len(content) / 100


@dataclass(frozen=True)
class KillInTheMiddle:
    """For ``before``: the run dies once so many episodes were kept in the middle."""

    nth: int

    def __call__(self) -> None:
        from strop.extensions.sandboxes.kept_episodes import KeptGroup

        keep, calls = KeptGroup.keep, 0

        async def counted(self: KeptGroup, environment: object, rollout: Rollout) -> None:
            nonlocal calls
            await keep(self, environment, rollout)  # type: ignore[arg-type]
            calls += rollout.ending is None
            if calls == self_nth:
                die()

        self_nth = self.nth
        KeptGroup.keep = counted  # type: ignore[method-assign]

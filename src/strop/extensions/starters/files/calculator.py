"""The environment of multi_turn.yaml: rows of a dataset, and a calculator that the policy may use between its turns."""

import re
from dataclasses import dataclass

from strop import Message, Rollout, Task, reward
from strop.environments.base import DatasetEnvironment, PromptedTask

CALL = re.compile(r"<calc>\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*</calc>")
INSTRUCTIONS = "Write <calc>12 * 34</calc>, with + - or *, to use a calculator. Then answer, with the result as the last number."
EXAMPLE = (  # small models copy what they see
    Message("user", "What is 12 * 34?"),
    Message("assistant", "<calc>12 * 34</calc>"),
    Message("user", "408"),
    Message("assistant", "The answer is 408."),
)


@dataclass(frozen=True, kw_only=True)
class Calculator(DatasetEnvironment):
    """Word problems, one number each."""

    def prompt(self, task: PromptedTask) -> tuple[Message, ...]:
        return (Message("system", INSTRUCTIONS), *EXAMPLE, *task.messages)

    async def respond(self, task: Task, rollout: Rollout) -> tuple[Message, ...] | None:
        """Answer the call in the policy's last turn. None, without one, ends the episode."""
        turn = rollout.policy_turns[-1].text
        if "<calc>" not in turn:
            return None
        call = CALL.search(turn)
        return (Message("user", "error: a call is <calc>12 * 34</calc>" if call is None else str(calculate(*call.groups()))),)

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: Task, rollout: Rollout) -> bool:
        numbers = re.findall(r"-?\d+", rollout.policy_turns[-1].text.replace(",", ""))
        return "<calc>" not in rollout.policy_turns[-1].text and numbers[-1:] == [task.answer]

    @reward(weight=0.2)  # less than for the answer: a signal while no answer is right yet
    def asked(self, task: Task, rollout: Rollout) -> bool:
        return any(CALL.search(turn.text) for turn in rollout.policy_turns)


def calculate(left: str, sign: str, right: str) -> int:
    """The policy's text is never evaluated as code."""
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[sign]

"""The tool and the rewards of tools.yaml."""

import re
from typing import Literal

from strop import Rollout, Task


def calculate(left: int, operator: Literal["+", "-", "*"], right: int) -> int:
    """Compute with two whole numbers.

    Args:
        left: the first number
        operator: what to do with them
        right: the second number
    """
    if max(abs(left), abs(right)) > 10**12:  # the policy's input is untrusted, and the exception is shown to it
        raise ValueError("numbers have at most 12 digits")
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def correct(task: Task, rollout: Rollout) -> bool:
    """The last number of the last turn is the answer."""
    return re.findall(r"-?\d+", rollout.text.replace(",", ""))[-1:] == [task.answer]


def called(task: Task, rollout: Rollout) -> bool:
    """A call was answered."""
    return any(message.role == "tool" and not message.content.startswith("Error") for message in rollout.messages)

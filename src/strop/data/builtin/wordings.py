"""The usual wording of questions in evaluation sets."""

from __future__ import annotations

BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
BOXED_LIST = f"{BOXED} Separate several answers with commas."


def word_choice(letters: str) -> str:
    """Return simple-evals' wording of multiple choice; ``letters`` are the letters of the options."""
    return (
        "Answer the following multiple choice question. The last line of your response should be of the following format: "
        f"'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. Think step by step before answering.\n\n{{question}}"
    )

"""Texts that show what a reward pays for: right answers, answers without knowledge, and answers that hedge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from strop.types import Task

AnswerForm = Callable[[str], str]
ANSWER_FORMS: Mapping[str, AnswerForm] = {
    "plain": lambda answer: answer,
    "sentence": lambda answer: f"The answer is {answer}.",
    "boxed": lambda answer: f"The answer is \\boxed{{{answer}}}",
    "Answer:": lambda answer: f"Answer: {answer}",
    "tags": lambda answer: f"<think>I know it.</think>\n<answer>{answer}</answer>",
    "####": lambda answer: f"I know it.\n#### {answer}",
    "code block": lambda answer: f"```\n{answer}\n```",
    "python block": lambda answer: f"```python\n{answer}\n```",
}
NONSENSE = (
    "lantern", "copper", "gently", "whistle", "the", "under", "seventeen", "orbit", "mosaic", "quickly", "because", "river", "pickle",
    "sideways", "a", "velvet", "thunder", "button", "maybe", "elephant", "cloud", "triangle", "of", "drizzle", "7", "pebble", "31",
    "harbour", "waffle",
)  # fmt: skip
LONGEST = 20_000  # characters


def make_nonsense(key: str, words: int) -> str:
    """Return random words that depend only on ``key``."""
    random = Random(key)
    return " ".join(random.choice(NONSENSE) for _ in range(words))


def make_ignorant_texts(task: Task, prompt: str, form: AnswerForm, *, longest: int, common_answer: str | None) -> dict[str, str]:
    """Return texts that can be written without knowing the answer. ``longest``: characters of the longest one."""
    length = max(min(longest, LONGEST), 1)
    texts = {
        "empty": "",
        "white space": " \n\t ",
        "prompt repeated": prompt,
        "0": "0",
        "0, in the answer's form": form("0"),
        "1": "1",
        "1, in the answer's form": form("1"),
        "all numbers to 100": " ".join(map(str, range(101))),
        "all choices": "A B C D E",
        "all choices, formatted": form("A, B, C, D"),
        "yes and no": "Yes, no. True, false.",
        "the longest possible": ("and so on " * (length // 10 + 1))[:length],
        "random words": make_nonsense(task.id, 60),
        "form without content": form(""),
        "refusal": "I'm sorry, but I can't help with that.",
    }
    if common_answer is not None:
        texts["the commonest answer"] = form(common_answer)
    return texts


def make_hedged_text(task: Task, form: AnswerForm, others: Sequence[str]) -> str | None:
    """Return the right answer among wrong ones, as a policy can write that guesses many; None if too few others are known."""
    wrong = [answer for answer in dict.fromkeys(others) if answer.strip() and answer.strip() != task.answer.strip()]
    if len(wrong) < 2:
        return None
    half = min(len(wrong) // 2, 4)
    return " or ".join(form(answer) for answer in (*wrong[:half], task.answer, *wrong[half : 2 * half]))


def make_padded_texts(task: Task, form: AnswerForm) -> dict[str, str]:
    """Return right answers in clothes that should earn nothing more."""
    return {
        "answer, then nonsense": f"{form(task.answer)}\n\n{make_nonsense(task.id, 40)}",
        "answer, said in many ways": "\n".join(other(task.answer) for other in (*ANSWER_FORMS.values(), form)),
    }

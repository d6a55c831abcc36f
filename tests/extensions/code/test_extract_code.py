"""The program in a reply."""

from __future__ import annotations

import time

import pytest

from strop.extensions.code.code_environment import extract_code, truncate_completion

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (f"Here:\n{BLOCK}\nDone.", "print(1)"),
        (f"{BLOCK}\nBetter:\n```python\nprint(2)\n```", "print(2)"),
        (f"{BLOCK}\nIt prints:\n```\n1\n```", "print(1)"),
        (f"{BLOCK}\nIn C:\n```c\nint main() {{}}\n```", "print(1)"),
        ("```\nprint(3)\n```", "print(3)"),
        ("```Python3\nprint(4)\n```", "print(4)"),
        ("```python\nprint(5)\nfor x in y:\n    pass", "print(5)\nfor x in y:\n    pass"),
        ("~~~python\nprint('```')\n~~~", "print('```')"),
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')"),
        ("```cpp\nint main() {}\n```", ""),
        (f"<think>\n{BLOCK}\n</think>\n```python\nprint(6)\n```", "print(6)"),
        (f"{BLOCK}\n</think>\nprint(7)", "\nprint(7)"),
        (f"<think>\n{BLOCK}", ""),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1"),
        ("- a\n    - b\n\n      ```python\n      x = 1\n      ```", "x = 1"),
        ('```python\ndef f():\n    """\n    ```\n    """\n```', 'def f():\n    """\n    ```\n    """'),
        ("<code>\nprint(8)\n</code>", "print(8)"),
        (f"<answer>{BLOCK}</answer>", "print(1)"),
        ("print(9)", "print(9)"),
        ("", ""),
    ],
)
def test_the_last_block_of_the_language_is_the_program(reply: str, code: str) -> None:
    assert extract_code(reply) == code


def test_other_languages_have_their_own_tags() -> None:
    reply = "```c++\nint main() {}\n```\n```js\n1\n```\n```sh\nls\n```"
    assert [extract_code(reply, name) for name in ("cpp", "javascript", "bash", "c")] == ["int main() {}", "1", "ls", ""]


def test_a_hostile_reply_is_read_in_linear_time() -> None:
    started = time.perf_counter()
    for piece in ("```python\n", "`" * 9, "<code>", "</think>", "```\n~~~\n", "\u2028```"):
        extract_code(piece * (1_000_000 // len(piece)))
    assert time.perf_counter() - started < 10


def test_a_completion_ends_before_the_next_definition() -> None:
    body = "    total = 0\n\n    # a comment\n    return total\n"
    assert truncate_completion(f"{body}\n\ndef main():\n    pass") == f"{body}\n\n"
    assert truncate_completion(f"{body}# said at the side\n    return 1\nprint(2)") == f"{body}# said at the side\n    return 1\n"

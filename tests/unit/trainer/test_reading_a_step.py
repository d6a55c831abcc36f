"""How much one reads to know what a step of GRPO does."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src/strop"
FILES = {  # what a step calls in it
    "trainer/train.py": {"train", "collect"},
    "algorithms/policy_gradient/base.py": {"keep", "advantages", "token_credit", "prepare_step", "zero_gradient", "loss"},
    "algorithms/policy_gradient/grpo.py": {"GroupRelative", "Clip", "GRPO"},
    "data/packing.py": {"pack"},
    "trainer/update.py": {"update"},
}


def test_a_step_of_grpo_is_read_in_five_files_and_five_hundred_lines() -> None:
    assert len(FILES) <= 5
    lines = {name: len((SOURCE / name).read_text(encoding="utf-8").splitlines()) for name in FILES}
    assert sum(lines.values()) <= 500, lines


def test_what_a_step_calls_is_in_these_files() -> None:
    for name, wanted in FILES.items():
        tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        defined = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert wanted <= defined, f"{name} lacks {wanted - defined}"

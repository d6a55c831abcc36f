"""The order in which workers take files of tests."""

from __future__ import annotations

from pathlib import Path

from support.schedule import DIVIDED, LONGEST, TOGETHER, LongestFirst

ROOT = Path(__file__).parents[2]


def test_the_files_and_folders_that_are_named_exist() -> None:
    named = {*LONGEST, *TOGETHER, *TOGETHER.values(), *DIVIDED}
    assert sorted(file for file in named if not (ROOT / file).exists()) == []
    pieces = set(TOGETHER.values())
    assert len(set(LONGEST)) == len(LONGEST) and not set(LONGEST) & (set(TOGETHER) - pieces)


def test_a_folder_is_one_piece_of_work_with_the_files_that_use_its_server() -> None:
    def piece(file: str) -> str:
        return LongestFirst._split_scope(object.__new__(LongestFirst), f"{file}::test_it[tests/a::b]")

    vllm, megatron = "tests/unit/generation/vllm", "tests/unit/learner/megatron"
    assert piece(f"{vllm}/test_vllm_engine.py") == piece("tests/loop/test_vllm_runs.py") == vllm
    assert piece(f"{megatron}/checkpoint/test_megatron_snapshot.py") == megatron
    assert piece("tests/unit/generation/test_lora_engine.py") == "tests/unit/generation/test_lora_engine.py"

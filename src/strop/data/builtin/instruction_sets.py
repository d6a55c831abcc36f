"""Requests with instructions that can be checked, for the environment ``ifeval``."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Grader, Splits

INSTRUCTION_SETS: Mapping[str, BuiltinDataset] = {
    "ifeval": BuiltinDataset(
        "google/IFEval", Splits(None, evaluation="train"), input_key="prompt", output_key="", grader=Grader("ifeval")
    ),
    "RLVR-IFeval": BuiltinDataset("allenai/RLVR-IFeval", input_key="messages", output_key="", grader=Grader("ifeval")),
}

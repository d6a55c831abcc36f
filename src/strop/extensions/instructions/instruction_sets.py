"""Sets of requests with instructions that can be checked."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin_dataset import BuiltinDataset, Grader, Splits

_IFEVAL = BuiltinDataset(
    "google/IFEval",
    Splits(None, evaluation="train"),
    input_key="prompt",
    output_key="",
    revision="966cd89545d6b6acfd7638bc708b98261ca58e84",
    grader=Grader("ifeval"),
)

INSTRUCTION_SETS: Mapping[str, BuiltinDataset] = {
    "ifeval": _IFEVAL,
    "IFEval": _IFEVAL,
    "RLVR-IFeval": BuiltinDataset(
        "allenai/RLVR-IFeval",
        input_key="messages",
        output_key="",
        revision="47c03c73621c4aab2b824b7818681117d662770e",
        grader=Grader("ifeval"),
    ),
}

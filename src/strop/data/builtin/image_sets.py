"""Questions about images, with the same columns and answers that NeMo-RL uses."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Condition, Grader, Splits


def _grade(answer: str, format_weight: float, **kwargs: float) -> Grader:
    """Return NeMo-RL's rewards for a set: its format, and its answer."""
    options = {"kwargs": kwargs} if kwargs else {}
    formatted = {"name": "format", "weight": format_weight}
    return Grader("vlm", {"rewards": [formatted, {"name": answer, "weight": 1 - format_weight, **options}]})


IMAGE_SETS: Mapping[str, BuiltinDataset] = {
    "clevr-cogent": BuiltinDataset(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        Splits("train", "valA", "valB"),
        row_reader="tagged_solution",
        split_hubs={"valA": "MMInstruction/Clevr_CoGenT_ValA", "valB": "MMInstruction/Clevr_CoGenT_ValB"},
        grader=_grade("exact_alnum", 0.2),
    ),
    "geometry3k": BuiltinDataset(
        "hiyouga/geometry3k",
        Splits("train", "validation", "test"),
        row_reader="single_image",
        grader=_grade("math_expr", 0.1),
    ),
    "refcoco": BuiltinDataset(
        "jxu124/refcoco",
        Splits("train", "validation", "test"),
        row_reader="described_region",
        media_files="the images of COCO 2014, in its folders train2014 and val2014",
        grader=_grade("bbox_giou", 0.1, giou_penalty_thres=0.5),
    ),
    "mmpr-tiny": BuiltinDataset(
        "OpenGVLab/MMPR-Tiny",
        subset="default",
        files={"default": ("mmpr_tiny.parquet",)},
        keep=(Condition("images", at_most=1),),  # as NeMo-RL reads it
        row_reader="reasoning_question",
        media_files="the folder images of its images.zip, as MMPR-Tiny/images",
        grader=Grader("vlm", {"rewards": [{"name": "geo3k", "weight": 1.0, "kwargs": {"format_score": 0.1}}]}),
    ),
}

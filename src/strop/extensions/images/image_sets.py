"""Sets of questions about images, with the same columns and answers that NeMo-RL uses."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset, Condition, Grader, Splits
from strop.data.sources.image_columns import IMAGES
from strop.data.sources.records import DataError, Record, get_text, get_value

PLACE = re.compile(r"\s*(<image(?:_\d+)?>)\s*")
REGION_SIZE = (256, 256)  # size that RefCOCO images are scaled to, in pixels
SCALE = 1000  # unit of box coordinates: thousandths of the image's width and height
REGION_QUESTION = "Please provide the bounding box coordinate of the region described by the following phrase: "


def read_tagged_solution(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """CLEVR-CoGenT's solution: the content of the first <answer>, or the whole text."""
    solution = get_text(record, "solution", "output_key", where)
    _, _, rest = solution.partition("<answer>")
    answer, end, _ = rest.partition("</answer>")
    return {"answer": (answer if end else solution).strip()}


def read_single_image(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """Geometry3K: the first image, placed before the problem, whose placeholder is removed."""
    images = get_value(record, IMAGES, "image_key", where)
    problem = get_text(record, "problem", "input_key", where)
    return {IMAGES: list(images or ())[:1], "problem": problem.replace("<image>", "")}


def read_reasoning_question(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """MMPR-Tiny: question and answer stand in nested columns, images are paths."""
    question = get_text(record, "extra_info.question", "input_key", where)
    answer = get_text(record, "reward_model.ground_truth", "output_key", where)
    return {"problem": PLACE.sub(r"\1", question).strip(), "answer": answer}


def read_described_region(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """RefCOCO: a phrase, and the box of the described region in thousandths of the image, which is scaled to 256 x 256 pixels.

    Of several phrases, a training row uses one chosen by the row's number, the same in every run; a validation row uses the
    longest.
    """
    path = Path(folder or "", get_text(record, "image_path", "image_key", where).removeprefix("coco/"))
    captions = [str(each) for each in get_value(record, "captions", "input_key", where)]
    if not captions:
        raise DataError(f"{where}: 'captions' is empty, so nothing says which region is meant. Fix the record")
    is_validation = "val" in str(record.get("split") or "")
    caption = max(captions, key=len) if is_validation else Random(str(record.get("ref_id"))).choice(captions)
    content, width, height = _scale_image(path, where)
    box = get_value(record, "bbox", "output_key", where)
    x0, y0, x1, y1 = (round(edge / size * SCALE) for edge, size in zip(box, (width, height, width, height), strict=True))
    return {"image": {"bytes": content}, "problem": REGION_QUESTION + caption, "answer": f"[{x0}, {y0}, {x1}, {y1}]"}


def _scale_image(path: Path, where: str) -> tuple[bytes, int, int]:
    """Return an image scaled to 256 x 256 pixels as PNG, and its original width and height. Raises DataError."""
    try:
        from PIL import Image

        with Image.open(path) as opened:
            scaled, file = opened.resize(REGION_SIZE), io.BytesIO()
            scaled.save(file, format="PNG")
            return file.getvalue(), opened.width, opened.height
    except ImportError as error:
        raise DataError(f"images are scaled by PIL, which cannot be imported here ({error}): pip install pillow") from error
    except Exception as error:  # PIL raises many classes for damaged files
        raise DataError(f"{where}: the image {str(path)!r} cannot be read ({error!s:.200}); check media_data_dir") from error


def _grade(answer: str, format_weight: float, **kwargs: float) -> Grader:
    """Return NeMo-RL's rewards for a set: its format, and its answer."""
    options = {"kwargs": kwargs} if kwargs else {}
    formatted = {"name": "format", "weight": format_weight}
    return Grader("vlm", {"rewards": [formatted, {"name": answer, "weight": 1 - format_weight, **options}]})


IMAGE_SETS: Mapping[str, BuiltinDataset] = {
    "clevr-cogent": BuiltinDataset(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        Splits("train", "valA", "valB"),
        read_row=read_tagged_solution,
        split_hubs={"valA": "MMInstruction/Clevr_CoGenT_ValA", "valB": "MMInstruction/Clevr_CoGenT_ValB"},
        grader=_grade("exact_alnum", 0.2),
    ),
    "geometry3k": BuiltinDataset(
        "hiyouga/geometry3k", Splits("train", "validation", "test"), read_row=read_single_image, grader=_grade("math_expr", 0.1)
    ),
    "refcoco": BuiltinDataset(
        "jxu124/refcoco",
        Splits("train", "validation", "test"),
        read_row=read_described_region,
        media_files="the images of COCO 2014, in its folders train2014 and val2014",
        grader=_grade("bbox_giou", 0.1, giou_penalty_thres=0.5),
    ),
    "mmpr-tiny": BuiltinDataset(
        "OpenGVLab/MMPR-Tiny",
        subset="default",
        files={"default": ("mmpr_tiny.parquet",)},
        keep=(Condition("images", at_most=1),),  # as NeMo-RL reads it
        read_row=read_reasoning_question,
        media_files="the folder images of its images.zip, as MMPR-Tiny/images",
        grader=Grader("vlm", {"rewards": [{"name": "geo3k", "weight": 1.0, "kwargs": {"format_score": 0.1}}]}),
    ),
}

"""Converts rows of built-in image sets into a question, its answer and its images."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from strop.data.sources.images.image_columns import IMAGES
from strop.data.sources.records import DataError, Record, get_text, get_value

ImageReader = Callable[[Record, str, str | None], Mapping[str, Any]]
"""Reads a record: (record, where, folder of the images) -> further columns."""

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


IMAGE_READERS: Mapping[str, ImageReader] = {
    "tagged_solution": read_tagged_solution,
    "single_image": read_single_image,
    "reasoning_question": read_reasoning_question,
    "described_region": read_described_region,
}

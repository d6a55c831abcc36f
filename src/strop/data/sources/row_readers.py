"""Converts rows of built-in data sets in unusual formats into columns and messages, or skips them."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset, Condition
from strop.data.sources.image_columns import IMAGES
from strop.data.sources.in_memory import ListRecords
from strop.data.sources.records import DataError, Record, Records, get_text, get_value
from strop.data.sources.streamed import StreamedRecords

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


logger = logging.getLogger(__name__)

TREE_SYSTEM_PROMPT = (  # system prompt of Open Assistant's conversations, as in NeMo-RL
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\n\n"
)
TREE_ROLES = {"prompter": "user", "assistant": "assistant"}
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
TURN = re.compile(r"\n\n(Human|Assistant):")


def read_rows(builtin: BuiltinDataset, records: Records, folder: str | None = None) -> Records:
    """Return the records converted by the entry's ``row_reader``: with further columns, or replaced by others.

    ``folder``: the images of a set that stores them separately."""
    if builtin.media_files is not None and folder is None:
        raise DataError(
            f"{records.name} names its images by their paths, and media_data_dir is not set; set it to the folder that has "
            f"{builtin.media_files}"
        )
    if builtin.row_reader is None:
        return records
    if isinstance(records, StreamedRecords):
        raise DataError(
            f"the rows of {records.name} are read in another form than they have, so they cannot be streamed; set streaming=false"
        )
    if builtin.row_reader == "conversation_trees":
        conversations = [each for index in range(len(records)) for each in _cut_tree(records, index)]
        if not conversations:
            raise DataError(f"none of the {len(records)} trees of {records.name} has a reply")
        return ListRecords(records.name, conversations, "conversation")
    if read_image := IMAGE_READERS.get(builtin.row_reader):
        return _ReadRecords(records, lambda record, where: read_image(record, where, folder))
    return _ReadRecords(records, COLUMN_READERS[builtin.row_reader])


def select_rows(builtin: BuiltinDataset, records: Records) -> Sequence[int]:
    """Return the indices of the records that meet the entry's conditions. Raises DataError if none does."""
    if not builtin.keep:
        return range(len(records))
    columns = tuple(dict.fromkeys(condition.column for condition in builtin.keep))
    rows = enumerate(records.iter_values(columns))
    kept = [index for index, values in rows if keeps_row(builtin.keep, dict(zip(columns, values, strict=True)))]
    if not kept:
        raise DataError(f"none of the {len(records)} rows of {records.name} can be used: {_format_conditions(builtin.keep)}")
    if left_out := len(records) - len(kept):
        logger.info(
            "%d of %d rows of %s are left out: %s", left_out, len(records), records.name, _format_conditions(builtin.keep)
        )
    return kept


def keeps_row(conditions: Sequence[Condition], record: Record) -> bool:
    """Return whether a row meets all conditions."""
    for condition in conditions:
        value = record.get(condition.column)
        text = "" if value is None else str(value)
        if condition.at_most is not None and isinstance(value, list | tuple) and len(value) > condition.at_most:
            return False
        if condition.one_of and text not in condition.one_of:
            return False
        if condition.none_of and text.strip().lower() in condition.none_of:
            return False
    return True


def _format_conditions(conditions: Sequence[Condition]) -> str:
    return ", ".join(map(_format_condition, conditions))


def _format_condition(condition: Condition) -> str:
    if condition.at_most is not None:
        return f"{condition.column} must be at most {condition.at_most}"
    if condition.one_of:
        return f"{condition.column} must be {' or '.join(map(repr, condition.one_of))}"
    return f"{condition.column} must not be {' or '.join(map(repr, condition.none_of))}"


class _ReadRecords(Records):
    """Records with columns computed when a record is read."""

    def __init__(self, records: Records, read: Callable[[Record, str], Mapping[str, Any]]) -> None:
        self.name, self.uniform, self._records, self._read = records.name, records.uniform, records, read

    def __len__(self) -> int:
        return len(self._records)

    def read_record(self, index: int) -> Record:
        record = self._records.read_record(index)
        return {**record, **self._read(record, self.location(index))}

    def location(self, index: int) -> str:
        return self._records.location(index)


def _preferred_response(record: Record, where: str) -> Mapping[str, Any]:
    """HelpSteer3's preference as a response: the better one, or the first for a tie."""
    first, second, preference = (record.get(key) for key in ("response1", "response2", "overall_preference"))
    if not isinstance(preference, int | float):
        raise DataError(f"{where}: 'overall_preference' is {preference!r:.80}, not a number from -3 to 3. Fix the record")
    return {"response": second if preference > 0 else first}


def _boxed_solution(record: Record, where: str) -> Mapping[str, Any]:
    """The answer of a worked solution: the content of its last \\boxed, in braces or, as in some MATH solutions, without."""
    solution = get_text(record, "solution", "output_key", where)
    *_, last = [None, *BOX.finditer(solution)]
    answer = "" if last is None else _read_group(solution, last.end()) if last[1] else solution[last.end() :].split("$")[0]
    if not answer.strip():
        raise DataError(
            f"{where}: 'solution' has no answer in \\boxed. Set output_key to a column of answers, or leave the row out"
        )
    return {"answer": answer.strip()}


def _read_group(text: str, start: int) -> str:
    """Return the text from ``start`` to its closing brace; empty if there is none."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return ""


def _dialogues(record: Record, where: str) -> Mapping[str, Any]:
    """hh-rlhf's texts, "\\n\\nHuman: ...\\n\\nAssistant: ...", as messages."""
    return {
        key: _split_dialogue(get_text(record, key, f"{key}_key", where), f"{where}: {key!r}") for key in ("chosen", "rejected")
    }


def _split_dialogue(text: str, where: str) -> list[dict[str, str]]:
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise DataError(f"{where} is {text!r:.80}, which does not begin with a turn, Human: or Assistant:. Fix the record")
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": content.strip()} for speaker, content in turns]


def _cut_tree(records: Records, index: int) -> Iterator[Record]:
    """Yield the conversation from the root of a reply tree to each of its leaves, except prompts without a reply."""
    record, where = records[index], records.location(index)
    branches: list[tuple[Any, tuple[dict[str, str], ...]]] = [(record.get("prompt", record), ())]
    while branches:
        node, before = branches.pop()
        messages = (*before, _tree_message(node, where))
        if replies := node.get("replies"):
            branches += [(reply, messages) for reply in reversed(replies)]
        elif len(messages) > 1:
            yield {"messages": [{"role": "system", "content": TREE_SYSTEM_PROMPT}, *messages]}


def _tree_message(node: Any, where: str) -> dict[str, str]:
    if not isinstance(node, Mapping) or node.get("role") not in TREE_ROLES:
        raise DataError(f"{where} is no tree of messages by a prompter and an assistant: {node!r:.80}. Fix the record")
    return {"role": TREE_ROLES[node["role"]], "content": get_text(node, "text", "messages_key", where)}


COLUMN_READERS: Mapping[str, Callable[[Record, str], Mapping[str, Any]]] = {
    "preferred_response": _preferred_response,
    "boxed_solution": _boxed_solution,
    "dialogues": _dialogues,
}

"""Images in SGLang's requests.

SGLang is given the pixels that the learner reads, and the tokens that stand for them: nothing is resized or written twice, so the two see
the same.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.vision.vision_tower import ImageGrid, row_positions
from strop.types import PromptImage

GRID = "image_grid_thw"  # of the pixels of Qwen's towers: frames, rows and columns of patches


@dataclass(frozen=True)
class PreparedImage:
    """What a request says of an image (``SharedPixels``)."""

    place: PromptImage
    pixels: dict[str, Tensor]
    identity: str  # names the image and the weights

    @classmethod
    def read(cls, said: str) -> PreparedImage:
        """Read the file of pixels, which lies in the server's own folder."""
        fields = json.loads(said)
        path = Path(tempfile.gettempdir()) / Path(fields["file"]).name
        place = PromptImage(start=fields["start"], length=fields["length"], content=b"", digest="")
        return cls(place, torch.load(path, weights_only=True), fields["identity"])

    def grid(self, merged: int) -> ImageGrid:
        """``merged``: patches of a token in each direction."""
        frames, rows, columns = (int(size) for size in self.pixels[GRID].flatten())
        return ImageGrid(frames, rows // merged, columns // merged)


class PreparedImages:
    """Stands for SGLang's processor of a model's images. They arrive prepared."""

    prefer_tokenized_input = True

    def __init__(self, config: Any) -> None:
        """``config``: of the model."""
        self.config = config

    async def process_mm_data_async(self, image_data: Sequence[str], input_text: Sequence[int], **_: Any) -> Any:
        """Return what SGLang's processors return of a request. ``input_text``: its tokens, which stay as they are."""
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        images = [PreparedImage.read(said) for said in image_data]
        merged = self.config.vision_config.spatial_merge_size
        rope = row_positions(len(input_text), [image.place for image in images], [image.grid(merged) for image in images])
        items = [_make_item(image) for image in images]
        return MultimodalProcessorOutput(
            input_ids=list(input_text),
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(list(input_text), items),
            mm_items=items,
            im_token_id=self.config.image_token_id,
            mrope_positions=rope.positions,
            mrope_position_delta=torch.tensor([[rope.following[0] - len(input_text)]]),
        )

    def clear_preprocess_cache(self) -> None:
        """There is none: SGLang reads it after weights from disk."""


def use_prepared_images() -> None:
    """Let the server of this process take images as ``PreparedImage`` and nothing else."""
    from sglang.srt.managers import tokenizer_manager

    tokenizer_manager.import_processors = lambda package: None
    tokenizer_manager.get_processor_wrapper = _load_tokenizer
    tokenizer_manager.get_mm_processor = lambda config, *arguments, **named: PreparedImages(config)


def use_tokenizer_alone() -> None:
    """Load the tokenizer where SGLang's scheduler would load the processors of images and videos, whose files a model may lack."""
    from sglang.srt.managers import scheduler, tp_worker

    for module in (scheduler, tp_worker):
        module.get_processor = _load_tokenizer
    scheduler.import_processors = lambda package: None
    scheduler.get_mm_processor = lambda *arguments, **named: None  # it computes positions that did not arrive, and they do


def _load_tokenizer(*_: Any, **__: Any) -> Any:
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(get_serving().tokenizer_path, trust_remote_code=get_model().trust_remote_code)


def _make_item(image: PreparedImage) -> Any:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    place = image.place
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(place.start, place.end - 1)],
        feature=image.pixels["pixel_values"],
        model_specific_data={GRID: image.pixels[GRID].reshape(1, 3)},
    )
    item.set_identity(hashlib.sha256(image.identity.encode()).digest())
    return item

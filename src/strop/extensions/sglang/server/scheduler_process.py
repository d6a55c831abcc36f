"""Images in SGLang's requests.

SGLang is given the pixels that the learner reads, and the tokens that stand for them: nothing is resized or written twice, so the two see
the same.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.managers import io_struct, scheduler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from torch import Tensor

from strop.extensions.sglang.server.cpu_stub import use_unpinned_memory
from strop.extensions.sglang.server.engine_calls import CALL_PREFIX, RESULT, WEIGHTS_VARIABLE
from strop.extensions.sglang.server.model_weights import ModelWeights
from strop.extensions.sglang.server.seeded_sampler import use_seeded_sampling
from strop.generation.vllm.launch import exit_with_driver
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


_check_weights = SchedulerWeightUpdaterManager.check_weights
_weights: dict[int, ModelWeights] = {}  # by the id of the manager: of this process there is one


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler in this process until it is told to end."""
    exit_with_driver()
    Req._check_token_based_finish = stop_at_request_tokens
    SchedulerWeightUpdaterManager.check_weights = take_call
    use_seeded_sampling()
    use_unpinned_memory()
    use_tokenizer_alone()
    LoRAAdapter.initialize_weights = lambda adapter: None  # the only one starts empty, and publishes fill its slot
    scheduler.run_scheduler_process(*arguments, **named)


def stop_at_request_tokens(request: Any, accepted: Sequence[int]) -> bool:
    """Whether a token that was just ``accepted`` ends the request. The model's own stop tokens are among the request's."""
    stops = request.sampling_params.stop_token_ids
    if not stops:
        return False
    for place, token in enumerate(accepted):
        if token in stops:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(accepted) + place + 1
            return True
    return False


def _weights_class() -> type[ModelWeights]:
    """Return what holds the weights: ``ModelWeights``, or the class that ``SglangLaunch.model_weights`` names."""
    module, _, name = os.environ.get(WEIGHTS_VARIABLE, "").partition(":")
    return getattr(importlib.import_module(module), name) if module else ModelWeights


def take_call(manager: Any, request: Any) -> Any:
    """Answer a request to the weights checker: SGLang's own, or a call of Strop's."""
    if not request.action.startswith(CALL_PREFIX):
        return _check_weights(manager, request)
    method, _, arguments = request.action.removeprefix(CALL_PREFIX).partition(" ")
    weights = _weights.get(id(manager)) or _weights.setdefault(id(manager), _weights_class()(manager))
    try:
        answer: tuple[bool, Any] = (True, getattr(weights, method)(*pickle.loads(base64.b64decode(arguments))))
    except Exception as error:
        answer = (False, f"{type(error).__name__}: {error}")
    answers = [answer]
    if (ranks := torch.distributed.get_world_size(group=manager.tp_cpu_group)) > 1:
        answers = [answer] * ranks
        torch.distributed.all_gather_object(answers, answer, group=manager.tp_cpu_group)
    failures = [str(result) for good, result in answers if not good]
    if failures:
        return io_struct.CheckWeightsReqOutput(success=False, message=failures[0])
    payload = [
        io_struct.ChecksumInfo(
            checksums={RESULT: base64.b64encode(pickle.dumps(result)).decode()}, per_gpu_checksum="", parallelism_info=[]
        )
        for _, result in answers
    ]
    return io_struct.CheckWeightsReqOutput(success=True, message="", payload=payload)

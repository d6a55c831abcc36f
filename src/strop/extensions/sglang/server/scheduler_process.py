"""The processes of an engine that hold the model: SGLang's scheduler, with what Strop adds to it.

SGLang starts ``run_scheduler`` once for each tensor-parallel rank. It changes four things before the scheduler begins:

- sampling, so that the distribution is Strop's and follows the seed of a request (``seeded_sampler``);
- stop tokens: those of the request end it and no others, since the run chooses them;
- adapters, which start empty: a publish writes them in place (``adapter_slot``);
- the weights checker takes Strop's calls too: they run between two steps, on every rank, and return bytes.
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.managers import io_struct, scheduler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from strop.extensions.sglang.server.cpu_stub import use_unpinned_memory
from strop.extensions.sglang.server.engine_calls import CALL_PREFIX, RESULT, WEIGHTS_VARIABLE
from strop.extensions.sglang.server.model_weights import ModelWeights
from strop.extensions.sglang.server.prepared_images import use_tokenizer_alone
from strop.extensions.sglang.server.seeded_sampler import use_seeded_sampling
from strop.generation.vllm.launch import exit_with_driver

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

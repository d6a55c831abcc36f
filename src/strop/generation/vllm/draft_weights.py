"""The weights of a draft head that the learner trains, in vLLM's drafter: loading them at a publish, and reading them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from strop.generation.vllm.weights.weight_readback import WeightShard, read_weight_shards, refresh_packed_copies

PREFIX = "draft."  # of their names in a publish


def load_draft(runner: Any, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a head, under the names of its checkpoint. Raises RuntimeError for an engine that has no drafter."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    model = _drafter(runner)
    reload_weights(runner.vllm_config, model, iter(weights.items()), None, True)
    if runner.device.type == "cpu":
        refresh_packed_copies(model)


def read_draft_shards(runner: Any, rank: int) -> Iterator[WeightShard]:
    """Yield this rank's shard of each tensor that the drafter computes with, named as in a publish. The embeddings are the policy's."""
    model = _drafter(runner)
    single = len(model.model.layers) == 1
    for shard in read_weight_shards(model, rank):
        name = shard.name.removeprefix("model.")
        if not name.startswith("embed_tokens"):
            yield replace(shard, name=PREFIX + (name.replace("layers.0.", "midlayer.", 1) if single else name))


def _drafter(runner: Any) -> Any:
    """Return the draft model of vLLM's model runner: V2 and newer V1 say it themselves, older ones have it in ``drafter``."""
    if callable(get_draft_model := getattr(runner, "get_draft_model", None)):
        model = get_draft_model()
    else:
        model = getattr(getattr(runner, "drafter", None), "model", None)
    if model is None:
        raise RuntimeError(
            "weights of a draft head were published, but this engine has no drafter that takes them: set "
            "policy.generation.vllm_cfg.speculation.method=eagle3, or policy.draft.enabled=false"
        )
    return model

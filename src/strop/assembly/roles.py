"""The roles of a run in this process: network, learner, reference, embedded engine."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch

from strop.algorithms.base import Algorithm
from strop.algorithms.grpo import GRPO
from strop.config.generation import GenerationConfig
from strop.config.policy import PolicyConfig
from strop.config.schema import GrpoRunConfig
from strop.data.errors import nearest
from strop.environments.registry import import_attribute
from strop.generation.torch.engine import TorchEngine
from strop.generation.torch.runner import CachedRunner, RecomputeRunner, Runner
from strop.models.loading import load_model, load_tokenizer, stop_tokens
from strop.models.memory import reuse_freed_memory
from strop.models.network import Network, disable_dropout
from strop.rollouts.template import ChatTemplate
from strop.sampling import Sampling
from strop.training.torch.learner import FrozenScorer, TorchLearner, TorchLearnerOptions

log = logging.getLogger(__name__)

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class Policy:
    """The model of a run with what belongs to it."""

    network: Network
    tokenizer: Any
    template: ChatTemplate
    stop_ids: tuple[int, ...]


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"policy.device is {wanted}, and torch finds no GPU here; set policy.device=cpu or auto")
    return torch.device(wanted)


def load_policy(
    model_name: str,
    *,
    tokenizer_name: str,
    chat_template: str | None,
    chat_options: Mapping[str, Any] | None,
    device: str,
    precision: str,
    threads: int | None,
    overrides: Mapping[str, Any] | None = None,
    chunk: int | None = 1024,
    packed: bool = True,
) -> Policy:
    """Raises ModelNotFound, ValueError."""
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = choose_device(device)
    if chosen.type == "cpu":
        reuse_freed_memory()
    model = load_model(model_name, overrides=overrides, device=str(chosen))
    for name in disable_dropout(model):
        log.warning("dropout of %s is off: it would make sampler and learner disagree", name)
    tokenizer = load_tokenizer(tokenizer_name, chat_template=chat_template)
    network = Network(model, precision=PRECISIONS[precision], chunk=chunk or 1 << 40, packed=None if packed else False)
    return Policy(network, tokenizer, ChatTemplate(tokenizer, options=chat_options), stop_tokens(model, tokenizer))


def load_training_policy(config: PolicyConfig) -> Policy:
    return load_policy(
        config.model_name,
        tokenizer_name=config.tokenizer.name,
        chat_template=config.tokenizer.chat_template,
        chat_options=config.tokenizer.chat_template_kwargs,
        device=config.device,
        precision=config.precision,
        threads=config.num_threads,
        overrides=config.hf_config_overrides,
        chunk=config.logprob_chunk_size,
        packed=config.sequence_packing.enabled,
    )


def make_learner(policy: Policy, config: PolicyConfig, sampling: Sampling) -> TorchLearner:
    packing = config.sequence_packing if config.sequence_packing.enabled else config.dynamic_batching
    schedule: list[Mapping[str, Any]] = []
    if config.scheduler is not None:
        schedule = [{"name": stage.name, "kwargs": stage.kwargs} for stage in config.scheduler.stages]
        schedule += [{"milestones": list(config.scheduler.milestones)}] if config.scheduler.milestones else []
    options = TorchLearnerOptions(
        optimizer=config.optimizer.name,
        optimizer_kwargs=config.optimizer.kwargs,
        schedule=schedule,
        max_grad_norm=config.max_grad_norm,
        train_tokens=packing.train_mb_tokens,
        score_tokens=packing.logprob_mb_tokens,
        activation_checkpointing=config.dtensor_cfg.activation_checkpointing,
    )
    return TorchLearner(policy.network, sampling, options)


def make_reference(policy: Policy, config: PolicyConfig, sampling: Sampling) -> FrozenScorer:
    """A frozen copy of the policy as it is now. Call it before a checkpoint is loaded."""
    model = copy.deepcopy(policy.network.model).eval()
    network = Network(model, precision=policy.network.precision, chunk=policy.network.chunk, packed=policy.network.packed)
    packing = config.sequence_packing if config.sequence_packing.enabled else config.dynamic_batching
    return FrozenScorer(network, sampling, score_tokens=packing.logprob_mb_tokens, offload=config.reference.offload)


def make_engine(policy: Policy, config: GenerationConfig, length: int) -> TorchEngine:
    """The embedded engine on the policy's own module. Raises ValueError where its memory holds no sequence."""
    options = config.torch_cfg
    runner: Runner
    if policy.network.takes_plans():
        runner = CachedRunner(
            policy.network,
            memory_bytes=options.kv_cache_memory_gb * 2**30,
            max_slots=options.max_num_seqs,
            length=length,
            prepack=options.prepack_weights,
            cuda_graphs=options.cuda_graphs,
        )
    else:
        log.warning("the embedded engine reads every sequence again at every token: %s", policy.network.fallback)
        runner = RecomputeRunner(policy.network, max_slots=options.max_num_seqs, length=length)
    return TorchEngine(runner, policy.tokenizer, stop_ids=policy.stop_ids, prefill_tokens=options.prefill_tokens)


def make_algorithm(config: GrpoRunConfig) -> Algorithm:
    """GRPO as the sections ``grpo`` and ``loss_fn`` set it, or a class from outside. Raises ValueError for what it does not take."""
    name = config.algorithm.name
    kind = GRPO if name == "grpo" else import_attribute(name) if ":" in name else None
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"algorithm.name: {name!r} is neither grpo nor module:Class of a strop.algorithms.base.Algorithm")
    if unwritten := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ValueError(f"algorithm.name: {name} does not define {', '.join(unwritten)}, which an algorithm must")
    if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
        raise ValueError(f"algorithm.name: {name} has options but is not decorated with @dataclass(frozen=True, kw_only=True)")
    known = {item.name: item for item in fields(kind) if item.init}
    for key in config.algorithm.kwargs:
        if key not in known:
            raise ValueError(f"algorithm.kwargs.{key}: {name} has no such field{nearest(key, known)}")
    given = {key: _as_annotated(kind, key, value) for key, value in config.algorithm.kwargs.items()}
    values = {**(_grpo_fields(config) if issubclass(kind, GRPO) else {}), **given}
    missing = [
        key for key, item in known.items() if key not in values and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"algorithm.kwargs: {name} needs {', '.join(missing)}")
    algorithm: Algorithm = kind(**values)
    return algorithm


def _as_annotated(kind: type, key: str, value: Any) -> Any:
    """A value of ``algorithm.kwargs`` as its field's type, which YAML may spell with a list. Raises ValueError for another type."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(get_type_hints(kind)[key]).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"algorithm.kwargs.{key}: found {value!r}: {error.errors()[0]['msg']}") from error


def _grpo_fields(config: GrpoRunConfig) -> dict[str, Any]:
    grpo, loss = config.grpo, config.loss_fn
    return {
        "baseline": grpo.minus_baseline,
        "leave_one_out": grpo.use_leave_one_out_baseline,
        "normalize": grpo.normalize_rewards,
        "advantage_low": grpo.advantage_clip_low,
        "advantage_high": grpo.advantage_clip_high,
        "clip_low": loss.ratio_clip_min,
        "clip_high": loss.ratio_clip_max,
        "dual_clip": loss.ratio_clip_c,
        "on_policy_ratio": loss.force_on_policy_ratio,
        "sequence_ratio": loss.sequence_level_importance_ratios,
        "aggregation": loss.resolved_aggregation,
        "constant_length": loss.constant_length,
        "kl_penalty": loss.reference_policy_kl_penalty,
        "kl_estimator": loss.reference_policy_kl_type,
        "kl_in_reward": loss.use_kl_in_reward,
        "kl_input_clamp": loss.kl_input_clamp_value,
        "kl_output_clamp": loss.kl_output_clamp_value,
        "drop_constant_groups": grpo.use_dynamic_sampling,
        "overlong_filtering": grpo.overlong_filtering,
    }


def tokenizer_saver(tokenizer: Any) -> Callable[[Path], Any]:
    return lambda folder: tokenizer.save_pretrained(folder)

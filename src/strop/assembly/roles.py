"""The roles of a run in this process: network, learner, reference, embedded engine."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from strop.config.generation import GenerationConfig
from strop.config.policy import ModelConfig, PolicyConfig
from strop.config.schema import PpoRunConfig, RmRunConfig
from strop.generation.torch.engine import TorchEngine
from strop.generation.torch.runner import CachedRunner, RecomputeRunner, Runner
from strop.models.classifiers import load_classifier, set_pad_token
from strop.models.loading import load_model, load_tokenizer, stop_tokens
from strop.models.lora import LoraOptions, add_adapters, count_parameters
from strop.models.memory import reuse_freed_memory
from strop.models.network import Network, disable_dropout
from strop.models.value import ValueNetwork
from strop.models.value_head import ValueHead
from strop.rollouts.template import ChatTemplate
from strop.sampling import Sampling
from strop.training.base import Scorer
from strop.training.torch.learner import FrozenScorer, TorchLearner, TorchLearnerOptions, TrainableNetwork
from strop.training.torch.master import round_weights
from strop.training.torch.optimizers import ParameterGroup
from strop.training.torch.parallel.placement import Placement
from strop.training.torch.reference import AdapterOffScorer

log = logging.getLogger(__name__)

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Speech(Protocol):
    """How a model's text becomes tokens, wherever the model is."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...


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


def prepare_device(wanted: str, threads: int | None) -> torch.device:
    """The device, with this process set up for it. Raises ValueError where it is not there."""
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = choose_device(wanted)
    if chosen.type == "cpu":
        reuse_freed_memory()
    return chosen


class Bring(Protocol):
    """How a model comes into this process, which may be one of many that share it."""

    def model(self, load: Callable[[str], Any], device: torch.device) -> Any:
        """What ``load(device)`` gives."""
        ...

    def network(self, model: Any, make: Callable[..., Any]) -> Any:
        """``make(model)``, or where it is known how the model reads ``make(model, packed=...)``."""
        ...


class Alone:
    """This process has the model for itself."""

    def model(self, load: Callable[[str], Any], device: torch.device) -> Any:
        return load(str(device))

    def network(self, model: Any, make: Callable[..., Any]) -> Any:
        return make(model)


ALONE = Alone()


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
    weights_dtype: str = "float32",
    bring: Bring = ALONE,
) -> Policy:
    """Raises ModelNotFound, ValueError."""
    chosen = prepare_device(device, threads)
    model = bring.model(lambda device: load_model(model_name, overrides=overrides, device=device), chosen)
    for name in disable_dropout(model):
        log.warning("dropout of %s is off: it would make sampler and learner disagree", name)
    tokenizer = load_tokenizer(tokenizer_name, chat_template=chat_template)
    make = partial(Network, precision=PRECISIONS[precision], chunk=chunk or 1 << 40)
    network = bring.network(model, make) if packed else make(model, packed=False)
    round_weights(model, PRECISIONS[weights_dtype])
    return Policy(network, tokenizer, ChatTemplate(tokenizer, options=chat_options), stop_tokens(model, tokenizer))


def load_training_policy(config: PolicyConfig, seed: int = 0, bring: Bring = ALONE) -> Policy:
    """``seed`` is that of the run: adapters begin with it."""
    policy = load_policy(
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
        weights_dtype=config.weights_dtype,
        bring=bring,
    )
    adapt(policy.network, config, seed)
    return policy


def adapt(network: Network, config: ModelConfig, seed: int) -> None:
    """Put adapters on a model that will be trained, where its configuration asks for them. After its weights were rounded."""
    if config.dtensor_cfg.lora_cfg.enabled:
        options = LoraOptions(**config.dtensor_cfg.lora_cfg.options())
        add_adapters(network.model, options, base=config.model_name, seed=seed)
        log.info("%s", count_parameters(network.model))


def make_learner(
    network: TrainableNetwork,
    config: ModelConfig,
    sampling: Sampling,
    *,
    whole_groups: bool = False,
    total_steps: int | None = None,
    section: str = "policy",
    placement: Placement | None = None,
) -> TorchLearner:
    """``placement``: where the network is, if not on one device.

    ``total_steps`` are the optimizer steps of the run, None where nothing limits it: the length of a schedule that sets none."""
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
        whole_groups=whole_groups,
        no_decay=config.optimizer.no_decay,
        parameter_groups=[
            ParameterGroup(match=group.match, lr=group.lr, weight_decay=group.weight_decay) for group in config.optimizer.groups
        ],
        total_steps=total_steps,
        average_decay=config.ema.decay if config.ema.enabled else None,
        average_start=config.ema.start_step,
        section=section,
    )
    return TorchLearner(network, sampling, options, placement)


def load_reward_policy(config: RmRunConfig, bring: Bring = ALONE) -> Policy:
    """The model of a reward model: a sequence classifier with one label, from a causal LM or from an earlier reward model."""
    settings = config.policy
    device = prepare_device(settings.device, settings.num_threads)
    tokenizer = load_tokenizer(settings.tokenizer.name, chat_template=settings.tokenizer.chat_template)
    load = partial(load_classifier, settings.model_name, overrides=settings.hf_config_overrides, seed=config.rm.seed)
    model = bring.model(lambda device: load(device=device), device)
    stop_ids = stop_tokens(model, tokenizer)
    set_pad_token(model, tokenizer, stop_ids)
    disable_dropout(model)
    network = _value_network(model, settings, bring)
    adapt(network, settings, config.rm.seed)
    return Policy(network, tokenizer, ChatTemplate(tokenizer, options=settings.tokenizer.chat_template_kwargs), stop_ids)


def make_critic(config: PpoRunConfig, policy: Policy, bring: Bring = ALONE) -> TrainableNetwork:
    """A head on the policy's hidden states, or a sequence classifier with one label of its own. Raises ValueError."""
    settings = config.value
    if settings.head_only:
        return ValueHead(policy.network)
    if settings.tokenizer.name != config.policy.tokenizer.name:
        _refuse_other_tokens(policy.tokenizer, settings.tokenizer.name)
    device = prepare_device(settings.device, settings.num_threads)
    load = partial(load_classifier, settings.model_name, overrides=settings.hf_config_overrides, seed=config.ppo.seed, spread=0.0)
    model = bring.model(lambda device: load(device=device), device)
    disable_dropout(model)
    network = _value_network(model, settings, bring)
    adapt(network, settings, config.ppo.seed)
    return network


def _value_network(model: Any, settings: ModelConfig, bring: Bring) -> ValueNetwork:
    make = partial(ValueNetwork, precision=PRECISIONS[settings.precision])
    network: ValueNetwork = bring.network(model, make) if settings.sequence_packing.enabled else make(model, packed=False)
    round_weights(model, PRECISIONS[settings.weights_dtype])
    return network


def _refuse_other_tokens(tokenizer: Any, name: str) -> None:
    """Raises ValueError unless every token of the policy is the same token to the tokenizer ``name``."""
    try:
        known, others = tokenizer.get_vocab(), load_tokenizer(name).get_vocab()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"value.tokenizer.name: no tokenizer could be loaded from {name}, so whether the critic reads the policy's tokens cannot be "
            f"told; where it does, name the policy's (policy.tokenizer.name): {error}"
        ) from error
    if odd := sorted((place, token) for token, place in known.items() if others.get(token) != place):
        place, token = odd[0]
        raise ValueError(
            f"value.tokenizer.name: the critic reads the tokens that the policy wrote, and {name} has {len(odd)} of them otherwise: "
            f"{token!r} is {place} to the policy and {others.get(token, 'unknown')} to it. Name a critic of the policy's family "
            "(value.model_name)"
        )


def make_reference(policy: Policy, config: PolicyConfig, sampling: Sampling) -> Scorer:
    """The policy with its adapters off, or a frozen copy of it as it is now. Call it before a checkpoint is loaded."""
    packing = config.sequence_packing if config.sequence_packing.enabled else config.dynamic_batching
    if config.dtensor_cfg.lora_cfg.enabled:
        return AdapterOffScorer(policy.network, sampling, score_tokens=packing.logprob_mb_tokens)
    model = copy.deepcopy(policy.network.model).eval()
    network = Network(model, precision=policy.network.precision, chunk=policy.network.chunk, packed=policy.network.packed)
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


def tokenizer_saver(tokenizer: Any) -> Callable[[Path], Any]:
    return lambda folder: tokenizer.save_pretrained(folder)

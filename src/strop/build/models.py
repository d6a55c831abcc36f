"""Load and build the models of a run in this process: policy, learner, reference, critic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from strop.config.schema.policy_config import PolicyConfig
from strop.config.schema.run_config import PpoRunConfig, RmRunConfig
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.torch.learner import TorchLearner, TorchLearnerOptions
from strop.learner.torch.optimizer import ParameterGroup
from strop.learner.torch.scorer import NetworkScorer, TrainableNetwork, copy_frozen, offload, without_adapters
from strop.models.chat_template import ChatTemplate
from strop.models.classifiers import load_classifier, set_pad_token
from strop.models.loading import cast_weights, find_stop_token_ids, load_model, load_tokenizer
from strop.models.lora import add_adapters, count_parameters
from strop.models.malloc import reuse_freed_memory
from strop.models.network import Network, disable_dropout
from strop.models.value_head import ValueHead
from strop.models.value_network import ValueNetwork
from strop.sampling import Sampling

log = logging.getLogger(__name__)

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TokenizerBundle(Protocol):
    """The tokenizer, chat template and stop tokens of a model, which may be in another process."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """The model of a run with its tokenizer, chat template and stop tokens."""

    network: Network
    tokenizer: Any
    template: ChatTemplate
    stop_ids: tuple[int, ...]


def resolve_device(device: str) -> torch.device:
    """Return the device that a configuration asks for; "auto" is a GPU if there is one. Raises ValueError if there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"policy.device is {device}, and torch finds no GPU here; set policy.device=cpu or auto")
    return torch.device(device)


def prepare_device(device: str, threads: int | None) -> torch.device:
    """Choose the device and set up this process for it. Raises ValueError if the device does not exist."""
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = resolve_device(device)
    if chosen.type == "cpu":
        reuse_freed_memory()
    return chosen


class ModelLoader(Protocol):
    """Loads a model in this process, which may be one of several ranks that shard it."""

    def load_model(self, load: Callable[[str], Any], device: torch.device) -> Any:
        """Return ``load(device)``."""
        ...

    def make_network(self, model: Any, make: Callable[..., Any]) -> Any:
        """Return ``make(model)``, or ``make(model, packed=...)`` if another rank has determined whether the model supports packed rows."""
        ...


class LocalLoader:
    """Loads the whole model in this process."""

    def load_model(self, load: Callable[[str], Any], device: torch.device) -> Any:
        return load(str(device))

    def make_network(self, model: Any, make: Callable[..., Any]) -> Any:
        return make(model)


LOCAL_LOADER = LocalLoader()


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
    loader: ModelLoader = LOCAL_LOADER,
) -> LoadedPolicy:
    """Load a model with its tokenizer. Raises ModelNotFound, ValueError."""
    chosen = prepare_device(device, threads)
    model = loader.load_model(lambda device: load_model(model_name, overrides=overrides, device=device), chosen)
    for name in disable_dropout(model):
        log.warning("dropout of %s is disabled: with it, generator and learner would compute different log-probabilities", name)
    tokenizer = load_tokenizer(tokenizer_name, chat_template=chat_template)
    make = partial(Network, precision=PRECISIONS[precision], chunk=chunk or 1 << 40)
    network = loader.make_network(model, make) if packed else make(model, packed=False)
    cast_weights(model, PRECISIONS[weights_dtype])
    return LoadedPolicy(network, tokenizer, ChatTemplate(tokenizer, options=chat_options), find_stop_token_ids(model, tokenizer))


def load_training_policy(config: PolicyConfig, seed: int = 0, loader: ModelLoader = LOCAL_LOADER) -> LoadedPolicy:
    """Load the policy of a run, with adapters if LoRA is enabled. ``seed``: of the run; initializes the adapters."""
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
        loader=loader,
    )
    apply_lora(policy.network, config, seed)
    return policy


def apply_lora(network: Network, config: ModelConfig, seed: int) -> None:
    """Add LoRA adapters to a model if its configuration enables them. Call it after the weights are rounded to ``weights_dtype``."""
    if config.dtensor_cfg.lora_cfg.enabled:
        add_adapters(network.model, config.dtensor_cfg.lora_cfg, base=config.model_name, seed=seed)
        log.info("%s", count_parameters(network.model))


def make_learner(
    network: TrainableNetwork,
    config: ModelConfig,
    sampling: Sampling,
    *,
    whole_groups: bool = False,
    total_steps: int | None = None,
    section: str = "policy",
    parallelism: Parallelism | None = None,
) -> TorchLearner:
    """Make a learner for a network. ``parallelism``: how the network is sharded; None: on a single device.

    ``total_steps``: optimizer steps of the run, the length of a schedule that sets none; None if the run has no limit."""
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
    return TorchLearner(network, sampling, options, parallelism)


def load_reward_policy(config: RmRunConfig, loader: ModelLoader = LOCAL_LOADER) -> LoadedPolicy:
    """Load a reward model to train: a sequence classifier with one label, from a causal LM or from an earlier reward model."""
    settings = config.policy
    device = prepare_device(settings.device, settings.num_threads)
    tokenizer = load_tokenizer(settings.tokenizer.name, chat_template=settings.tokenizer.chat_template)
    load = partial(load_classifier, settings.model_name, overrides=settings.hf_config_overrides, seed=config.rm.seed)
    model = loader.load_model(lambda device: load(device=device), device)
    stop_ids = find_stop_token_ids(model, tokenizer)
    set_pad_token(model, tokenizer, stop_ids)
    disable_dropout(model)
    network = _make_value_network(model, settings, loader)
    apply_lora(network, settings, config.rm.seed)
    return LoadedPolicy(network, tokenizer, ChatTemplate(tokenizer, options=settings.tokenizer.chat_template_kwargs), stop_ids)


def make_critic(config: PpoRunConfig, policy: LoadedPolicy, loader: ModelLoader = LOCAL_LOADER) -> TrainableNetwork:
    """Make the critic: a value head on the policy's hidden states, or a sequence classifier with one label. Raises ValueError."""
    settings = config.value
    if settings.head_only:
        return ValueHead(policy.network)
    if settings.tokenizer.name != config.policy.tokenizer.name:
        _check_same_vocabulary(policy.tokenizer, settings.tokenizer.name)
    device = prepare_device(settings.device, settings.num_threads)
    load = partial(
        load_classifier, settings.model_name, overrides=settings.hf_config_overrides, seed=config.ppo.seed, init_std=0.0
    )
    model = loader.load_model(lambda device: load(device=device), device)
    disable_dropout(model)
    network = _make_value_network(model, settings, loader)
    apply_lora(network, settings, config.ppo.seed)
    return network


def _make_value_network(model: Any, settings: ModelConfig, loader: ModelLoader) -> ValueNetwork:
    make = partial(ValueNetwork, precision=PRECISIONS[settings.precision])
    network: ValueNetwork = loader.make_network(model, make) if settings.sequence_packing.enabled else make(model, packed=False)
    cast_weights(model, PRECISIONS[settings.weights_dtype])
    return network


def _check_same_vocabulary(tokenizer: Any, name: str) -> None:
    """Raise ValueError unless the tokenizer ``name`` gives every token of the policy the same id."""
    try:
        policy_vocab, critic_vocab = tokenizer.get_vocab(), load_tokenizer(name).get_vocab()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"value.tokenizer.name: no tokenizer could be loaded from {name}, so its vocabulary cannot be compared with the policy's; if "
            f"they are the same, name the policy's tokenizer (policy.tokenizer.name): {error}"
        ) from error
    if different := sorted((token_id, token) for token, token_id in policy_vocab.items() if critic_vocab.get(token) != token_id):
        token_id, token = different[0]
        raise ValueError(
            f"value.tokenizer.name: the critic reads the tokens that the policy wrote, and {name} has {len(different)} other ids: "
            f"{token!r} is {token_id} for the policy and {critic_vocab.get(token, 'unknown')} for the critic. "
            "Name a critic of the policy's family (value.model_name)"
        )


def make_reference(policy: LoadedPolicy, config: PolicyConfig, sampling: Sampling) -> NetworkScorer:
    """Make the reference: the policy with its adapters disabled, or a frozen copy of it. Call it before a checkpoint is loaded."""
    packing = config.sequence_packing if config.sequence_packing.enabled else config.dynamic_batching
    tokens = packing.logprob_mb_tokens
    if config.dtensor_cfg.lora_cfg.enabled:
        return NetworkScorer(policy.network, sampling, tokens, context=without_adapters(policy.network))
    network = copy_frozen(policy.network)
    return NetworkScorer(network, sampling, tokens, context=offload(network) if config.reference.offload else nullcontext)


def write_model_folder(policy: LoadedPolicy, folder: Path, *, weights: bool = False) -> Path:
    """Write the folder that engines build the model from: configuration and tokenizer. ``weights``: also the weights, for an engine that
    receives none from a learner."""
    folder.mkdir(parents=True, exist_ok=True)
    model = policy.network.model
    if weights:
        model.save_pretrained(folder)
    else:
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer_saver(tokenizer: Any) -> Callable[[Path], Any]:
    return lambda folder: tokenizer.save_pretrained(folder)

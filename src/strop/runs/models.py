"""Load and build the models of a run in this process: policy, learner, reference, critic."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from strop.algorithms.base import Algorithm
from strop.config import TrainingRunConfig
from strop.config.schema.policy_config import PolicyConfig
from strop.config.schema.run_config import PpoRunConfig, RolloutRunConfig, list_trained_models
from strop.determinism import follow_environment
from strop.learner.budget.device_memory import reuse_freed_memory
from strop.learner.learner_config import policy_extensions
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.parallel.single_device import SingleDevice
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import NetworkScorer, TrainableNetwork, copy_frozen, offload, without_adapters
from strop.learner.torch.tensor_offload import ModelOffload, TensorOffload
from strop.models.adapters import adapter_folder, base_model_name, lora_layers
from strop.models.attention.rotary_scaling import fix_rotary_length, fixed_rotary_config
from strop.models.chat_template import ChatTemplate
from strop.models.loading import (
    ModelNotFound,
    apply_overrides,
    cast_weights,
    find_stop_token_ids,
    is_vision_config,
    load_model,
    load_tokenizer,
    read_model_config,
    read_stop_token_ids,
)
from strop.models.network import Network, disable_dropout, freeze_routers
from strop.models.quantization.float8_training import convert_to_float8
from strop.models.value_network import ValueHead, ValueNetwork, load_classifier, set_pad_token
from strop.models.vision.vision_processor import find_vision_processor
from strop.models.vision.vision_tower import freeze_audio, freeze_tower
from strop.runs.local_device import resolve_device_name
from strop.runs.run_algorithm import count_steps_per_batch
from strop.sampling import Sampling

log = logging.getLogger(__name__)

LearnerT = TypeVar("LearnerT")

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch's own

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class TokenizerBundle:
    """The tokenizer, chat template and stop tokens of a model, which may be in another process."""

    tokenizer: Any
    template: ChatTemplate
    stop_ids: tuple[int, ...]

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and the image processor of a model that reads images, to a model's folder."""
        self.tokenizer.save_pretrained(folder)
        if self.template.vision is not None:
            self.template.vision.save(folder)


def load_bundle(config: ModelConfig) -> TokenizerBundle:
    """Load a model's tokenizer, and the end-of-turn tokens from its configuration, without the model. Raises ModelNotFound."""
    tokenizer = load_tokenizer(config.tokenizer.name, chat_template=config.tokenizer.chat_template, key=tokenizer_key(config))
    stop_ids = read_stop_token_ids(config.model_name, tokenizer, overrides=config.hf_config_overrides)
    return TokenizerBundle(tokenizer, make_template(config, tokenizer, read_model_config(config.model_name)), stop_ids)


def make_template(config: ModelConfig, tokenizer: Any, model_config: Any) -> ChatTemplate:
    """Create a model's chat template, which writes images if the model reads them. ``model_config``: from Transformers."""
    vision = find_vision_processor(
        base_model_name(adapters) if (adapters := adapter_folder(config.model_name)) is not None else config.model_name,
        model_config,
        tokenizer,
        options=config.image_processor.settings(),
        allow_addresses=config.image_processor.allow_addresses,
    )
    return ChatTemplate(tokenizer, options=config.tokenizer.chat_template_kwargs, vision=vision)


def model_fingerprint(model: nn.Module, *, samples: int = 1024) -> str:
    """Return a hash of a model's weights: names, shapes and about ``samples`` entries of each parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(flat[:: max(len(flat) // samples, 1)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class LoadedPolicy(TokenizerBundle):
    """A model in this process, with its tokenizer."""

    network: Network

    @property
    def packed(self) -> bool:
        """Whether the model reads packed rows."""
        return self.network.packed

    @property
    def fallback(self) -> str | None:
        """Why the model reads padded rows."""
        return self.network.fallback

    @property
    def vocab_size(self) -> int:
        """Size of the output layer; 0 for a network without one."""
        return 0 if isinstance(self.network, ValueNetwork) else self.network.head.vocabulary

    @property
    def adapter_layers(self) -> tuple[str, ...]:
        """Names of the layers with LoRA adapters."""
        return tuple(layer.name for layer in lora_layers(self.network.model))

    def fingerprint(self) -> str:
        """Return a hash of the current weights."""
        return model_fingerprint(self.network.model)


def resolve_device(device: str) -> torch.device:
    """Return the configured device; "auto" is a GPU if there is one. Raises ValueError if there is none."""
    return torch.device(resolve_device_name(device))


def prepare_device(device: str, threads: int | None) -> torch.device:
    """Choose the device and set up this process for it. Raises ValueError if the device does not exist."""
    follow_environment()
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = resolve_device(device)
    if chosen.type == "cpu":
        reuse_freed_memory()
    return chosen


def select_device(device: str) -> None:
    """Make the policy's GPU the current one of this process, which libraries use by default."""
    chosen = resolve_device(device)
    if chosen.index is not None:
        torch.get_device_module(chosen).set_device(chosen)


def set_up_gpu(config: TrainingRunConfig) -> None:
    """Make the policy's GPU the current one, and configure its memory segments, before anything is allocated.

    Expandable segments leave no gaps between packed rows of ever new lengths. Other processes cannot map them, or only slowly, so
    a learner that may send its weights by CUDA IPC uses fixed segments.
    """
    select_device(config.policy.device)
    if resolve_device(config.policy.device).type != "cuda":
        return
    chosen = next((os.environ[name] for name in ALLOCATOR_SETTINGS if "expandable_segments" in os.environ.get(name, "")), None)
    if chosen is not None:
        log.info("GPU memory of the learner: %s, set by an environment variable", chosen)
    elif _may_send_by_ipc(config):
        log.info(
            "GPU memory of the learner: fixed segments, as weights may be sent by CUDA IPC; transport=memory lets them expand"
        )
    else:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        log.info("GPU memory of the learner: segments that expand, as nothing is sent by CUDA IPC")


def _may_send_by_ipc(config: TrainingRunConfig) -> bool:
    if not isinstance(config, RolloutRunConfig) or not config.policy.generation.uses_engines:
        return False
    generation = config.policy.generation
    return generation.colocated.enabled and generation.weight_sync.transport in ("auto", "cuda_ipc")


class ModelLoader(Protocol):
    """Loads a model in this process, which may be one of several ranks that shard it."""

    def load_model(self, load: Callable[..., Any], name: str, device: torch.device, **options: Any) -> Any:
        """Return ``load(name, device=..., **options)``."""
        ...

    def make_network(self, kind: Callable[..., Any], model: Any, **options: Any) -> Any:
        """Return ``kind(model, **options)``, with ``packed`` if another rank has determined whether the model supports packed rows."""
        ...

    def measure(self, find: Callable[[], Any]) -> Any:
        """Return ``find()``, which only a rank that has the model's weights calls."""
        ...


class LocalLoader:
    """Loads the whole model in this process."""

    def load_model(self, load: Callable[..., Any], name: str, device: torch.device, **options: Any) -> Any:
        return load(name, device=str(device), **options)

    def make_network(self, kind: Callable[..., Any], model: Any, **options: Any) -> Any:
        return kind(model, **options)

    def measure(self, find: Callable[[], Any]) -> Any:
        return find()


class HostLoader(LocalLoader):
    """Loads the whole model into CPU memory, so that a device with rounded weights need not hold it in float32."""

    def load_model(self, load: Callable[..., Any], name: str, device: torch.device, **options: Any) -> Any:
        return load(name, device="cpu", **options)


LOCAL_LOADER = LocalLoader()
HOST_LOADER = HostLoader()


def load_policy(config: ModelConfig, seed: int = 0, loader: ModelLoader = LOCAL_LOADER) -> LoadedPolicy:
    """Load a language model with its tokenizer, and with adapters if LoRA is enabled; ``seed`` initializes them.

    Raises ModelNotFound, ValueError.
    """
    device = prepare_device(config.device, config.num_threads)
    overrides, dequantize = config.hf_config_overrides, config.dequantize_base_checkpoint
    model = loader.load_model(load_model, config.model_name, device, overrides=overrides, dequantize=dequantize)
    for name in disable_dropout(model):
        log.warning("dropout of %s is disabled: with it, generator and learner would compute different log-probabilities", name)
    tokenizer = load_tokenizer(config.tokenizer.name, chat_template=config.tokenizer.chat_template, key=tokenizer_key(config))
    network = _make_network(Network, model, config, loader, chunk=config.logprob_chunk_size)
    template = make_template(config, tokenizer, model.config)
    if template.vision is not None:
        network.enable_vision(template.vision)
    policy = LoadedPolicy(tokenizer, template, find_stop_token_ids(model, tokenizer), network)
    _apply_lora(network, config, seed)
    return policy


def tokenizer_key(config: ModelConfig) -> str:
    """Return the key that names the tokenizer: the model's, unless another tokenizer is configured."""
    return "policy.model_name" if config.tokenizer.name == config.model_name else "policy.tokenizer.name"


def load_reward_policy(config: ModelConfig, seed: int, loader: ModelLoader = LOCAL_LOADER) -> LoadedPolicy:
    """Load a reward model to train: a sequence classifier with one label, from a causal LM or from an earlier reward model."""
    tokenizer = load_tokenizer(config.tokenizer.name, chat_template=config.tokenizer.chat_template, key=tokenizer_key(config))
    network = _load_value_network(config, seed, loader)
    stop_ids = find_stop_token_ids(network.model, tokenizer)
    set_pad_token(network.model, tokenizer, stop_ids)
    _apply_lora(network, config, seed)
    return LoadedPolicy(tokenizer, ChatTemplate(tokenizer, options=config.tokenizer.chat_template_kwargs), stop_ids, network)


def load_training_policy(config: TrainingRunConfig, loader: ModelLoader = LOCAL_LOADER) -> LoadedPolicy:
    """Load the model that a run trains. Raises ModelNotFound, ValueError."""
    set_up_gpu(config)
    load = load_reward_policy if config.trains_scores else load_policy
    policy = load(config.policy, config.training.seed, loader)
    if isinstance(config, RolloutRunConfig) and config.policy.router_replay.enabled:
        policy.network.enable_router_replay()
    if isinstance(config, RolloutRunConfig) and config.policy.router_replay.indexers:
        policy.network.enable_indexer_replay(config.policy.max_total_sequence_length)
    for extension in policy_extensions(config.policy):
        extension.change_policy(policy.network, policy.tokenizer, loader.measure, config.training.seed)
    convert_to_float8(policy.network.model, config.policy.fp8, resolve_device(config.policy.device), "policy.fp8")
    return policy


def make_critic(config: PpoRunConfig, policy: LoadedPolicy, loader: ModelLoader = LOCAL_LOADER) -> TrainableNetwork:
    """Make the critic: a value head on the policy's hidden states, or a sequence classifier with one label. Raises ValueError."""
    if config.value.head_only:
        return ValueHead(policy.network)
    if config.value.tokenizer.name != config.policy.tokenizer.name:
        check_same_vocabulary(policy.tokenizer, config.value.tokenizer.name)
    try:
        network = _load_value_network(config.value, config.ppo.seed, loader, init_std=0.0)
    except ModelNotFound as error:
        raise error.with_key("value.model_name") from error
    _apply_lora(network, config.value, config.ppo.seed)
    convert_to_float8(network.model, config.value.fp8, resolve_device(config.value.device), "value.fp8")
    return network


def make_trained_networks(
    config: TrainingRunConfig, policy: LoadedPolicy, loader: ModelLoader = LOCAL_LOADER
) -> dict[str, TrainableNetwork]:
    """Return the networks that a run trains by learner: the policy's, and the critic's if there is one. Raises ValueError."""
    critic = {"value": make_critic(config, policy, loader)} if isinstance(config, PpoRunConfig) else {}
    return {"policy": policy.network, **critic}


def make_learners(
    config: TrainingRunConfig,
    networks: Mapping[str, TrainableNetwork],
    algorithm: Algorithm,
    sampling: Sampling,
    total_steps: int | None,
    parallelism: Mapping[str, Parallelism] = MappingProxyType({}),
) -> dict[str, TorchLearner]:
    """Make the learners of a run. ``parallelism``: how their networks are sharded; those without are on a single device.

    ``total_steps``: optimizer steps of the run; None: no limit.
    """

    def make(name: str, **options: Any) -> TorchLearner:
        return TorchLearner(networks[name], parallelism=parallelism.get(name), **options)

    return make_each_learner(config, networks, algorithm, sampling, total_steps, make)


def make_each_learner(
    config: TrainingRunConfig,
    names: Iterable[str],
    algorithm: Algorithm,
    sampling: Sampling,
    total_steps: int | None,
    make: Callable[..., LearnerT],
) -> dict[str, LearnerT]:
    """Create the learner of each trained model: ``make`` is called with its name and the common options of all learners."""
    sections = dict(list_trained_models(config))
    return {
        name: make(
            name,
            config=sections.get(name, config.policy),  # a policy of a role is trained like the run's
            sampling=sampling,
            whole_groups=algorithm.whole_groups and name != "value",
            total_steps=total_steps,
            steps_per_batch=count_steps_per_batch(config) if isinstance(config, RolloutRunConfig) else 1,
            section=name if name in sections else "policy",
        )
        for name in names
    }


def _load_value_network(config: ModelConfig, seed: int, loader: ModelLoader, init_std: float | None = None) -> ValueNetwork:
    device = prepare_device(config.device, config.num_threads)
    model = loader.load_model(
        load_classifier,
        config.model_name,
        device,
        overrides=config.hf_config_overrides,
        seed=seed,
        init_std=init_std,
        dequantize=config.dequantize_base_checkpoint,
    )
    disable_dropout(model)
    network: ValueNetwork = _make_network(ValueNetwork, model, config, loader)
    return network


def _make_network(kind: Callable[..., Any], model: Any, config: ModelConfig, loader: ModelLoader, **options: Any) -> Any:
    """Return ``kind(model, ...)`` with the configured precisions. The model is probed for packed rows before its weights are rounded."""
    fix_rotary_length(model, config.max_total_sequence_length)
    options |= {"precision": PRECISIONS[config.precision], "attention_kernel": config.attention_kernel}
    make = loader.make_network if config.sequence_packing.enabled else _make_padded
    network = make(kind, model, **options)
    cast_weights(model, PRECISIONS[config.weights_dtype])
    if config.freeze_moe_router:
        log.info("%d routers of experts are frozen", len(freeze_routers(model)))
    if is_vision_config(model.config):
        freeze_audio(model)
    if config.freeze_vision_tower and is_vision_config(model.config):
        log.info("the vision tower is frozen: %s weights", f"{freeze_tower(model):,}")
    return network


def _make_padded(kind: Callable[..., Any], model: Any, **options: Any) -> Any:
    return kind(model, packed=False, **options)


def _apply_lora(network: Network, config: ModelConfig, seed: int) -> None:
    """Add LoRA adapters if they are enabled. Call it after the weights are rounded to ``weights_dtype``."""
    if config.dtensor_cfg.lora_cfg.enabled:
        from strop.models.lora import add_adapters, count_parameters

        add_adapters(network.model, config.dtensor_cfg.lora_cfg, base=config.model_name, seed=seed)
        log.info("%s", count_parameters(network.model))


def check_same_vocabulary(tokenizer: Any, name: str) -> None:
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
            f"value.tokenizer.name: the critic reads the tokens that the policy wrote, and {name} has {len(different)} different ids: "
            f"{token!r} is {token_id} for the policy and {critic_vocab.get(token, 'unknown')} for the critic. Name a critic of the "
            "policy's family (value.model_name)"
        )


def make_reference(policy: LoadedPolicy, config: PolicyConfig, sampling: Sampling) -> NetworkScorer:
    """Make the reference: the policy with its adapters disabled, or a frozen copy of it. Call it before a checkpoint is loaded."""
    tokens = config.score_tokens
    if config.dtensor_cfg.lora_cfg.enabled:
        return NetworkScorer(policy.network, sampling, tokens, context=without_adapters(policy.network))
    network = copy_frozen(policy.network)
    return NetworkScorer(network, sampling, tokens, context=offload(network) if config.reference.offload else nullcontext)


def make_offload(
    learners: Mapping[str, TorchLearner],
    scoring: Iterable[TrainableNetwork],
    parallelism: Mapping[int, Parallelism] = MappingProxyType({}),
    *,
    keep_weights: Collection[str] = (),
) -> ModelOffload:
    """Return the offload of a device while an engine samples on it: learners and networks that only score.

    ``keep_weights``: learners whose weights stay. ``parallelism``: of the scoring networks, by id; others are on one device.
    """
    device = next(iter(learners.values())).network.device
    trained = {id(learner.network) for learner in learners.values()}
    others = {id(network): network for network in scoring if id(network) not in trained}
    return ModelOffload(
        [
            *(learner.state_offload for learner in learners.values()),
            *(learner.weight_offload for name, learner in learners.items() if name not in keep_weights),
            *(
                TensorOffload((parallelism.get(key) or SingleDevice(network)).weight_tensors, device)
                for key, network in others.items()
            ),
        ]
    )


def write_model_folder(policy: LoadedPolicy, folder: Path, config: PolicyConfig) -> Path:
    """Write the folder from which engines build the model: configuration and tokenizer, but not the weights, which the learner
    sends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = policy.network.model
    described = type(model.config).from_dict(model.config.to_dict())
    described.architectures = [type(model).__name__]
    # Learner and engines use the rotary embeddings of the longest sequences for all.
    apply_overrides(described, fixed_rotary_config(described, config.max_total_sequence_length)).save_pretrained(folder)
    policy.save(folder)
    for extension in policy_extensions(config):
        extension.save_for_engines(policy.network, folder)
    return folder

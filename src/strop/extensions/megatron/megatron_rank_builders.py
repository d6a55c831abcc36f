"""Functions that build the Megatron Core models of a rank: each reads its shards from the files of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.config import TrainingRunConfig
from strop.config.schema.run_config import (
    PpoRunConfig,
    RolloutRunConfig,
)
from strop.distributed.workers.learner_worker import RankColumns, RankModels, RankScorer
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.extensions.distillation.teacher import shared_vocabulary_size
from strop.extensions.distillation.teachers import find_teacher_columns, load_rank_teachers, make_source, unfiltered_sampling
from strop.extensions.labs.draft.draft_config import DraftConfig
from strop.extensions.megatron.adapter_folder import AdapterFolder
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_dims import MegatronDims, model_errors
from strop.extensions.megatron.megatron_draft import MegatronDraftedPolicy
from strop.extensions.megatron.megatron_learner import MegatronLearner
from strop.extensions.megatron.megatron_network import MegatronNetwork, MegatronScorer
from strop.extensions.megatron.megatron_policy import MegatronPolicy, ModelFiles, find_model_files
from strop.extensions.megatron.models.build_stages import build_stages
from strop.extensions.megatron.schedule import prepare_schedule
from strop.extensions.megatron.stage_adapters import StageAdapters, gather_adapters
from strop.extensions.megatron.weight_map import FileWeights, ScoreInit, iter_weights, load_weights
from strop.learner.model_config import ModelConfig
from strop.learner.torch.tensor_offload import ModelOffload, TensorOffload
from strop.models.loading import ModelNotFound, load_tokenizer
from strop.models.local_files import ModelShape
from strop.problems import raise_problems
from strop.runs.backend import keeps_reference
from strop.runs.models import PRECISIONS, check_same_vocabulary, make_each_learner
from strop.sampling import Sampling
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.exporter import fingerprint_adapters
from strop.weight_sync.weight_source import Weight, local_weights


@dataclass(frozen=True)
class StageWeights:
    """The weights of a network under Hugging Face names. All ranks gather them one after another."""

    network: MegatronNetwork

    @property
    def device(self) -> torch.device:
        return self.network.device

    def iter_weights(self) -> Iterator[Weight]:
        self.network.gather_weights()  # those that a distributed optimizer has updated
        with self.network.layout.activate():
            adapters = self.network.adapters
            weights = list(
                iter_weights(self.network.stages, self.network.hf_config) if adapters is None else adapters.iter_merged()
            )
        drafted = self.network.draft if self.network.publishes_draft else None  # every rank has all of it
        return chain(self.in_layout(weights), () if drafted is None else local_weights(drafted.published_weights()))

    def in_layout(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Return weights that are gathered in the network's layout, whichever is active."""
        return (replace(weight, gather=partial(self._gather, weight)) for weight in weights)

    def _gather(self, weight: Weight) -> Tensor:
        with self.network.layout.activate():
            return weight.gather()

    def adapter_source(self) -> StageAdapterSource:
        return StageAdapterSource(self)


class StageAdapterSource:
    """An ``AdapterSource`` of a network's stages. All ranks call each method at the same time."""

    def __init__(self, weights: StageWeights) -> None:
        adapters = weights.network.adapters
        assert adapters is not None
        self.weights, self.adapters = weights, adapters

    def base_weights(self) -> Iterable[Weight]:
        network = self.weights.network
        with network.layout.activate():
            return self.weights.in_layout(list(iter_weights(network.stages, network.hf_config)))

    def export_files(self) -> AdapterFiles:
        return self._gather().files()

    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        tensors = self._gather().tensors
        return fingerprint_adapters(
            ((each, tensors[each.down.weight.name], tensors[each.up.weight.name]) for each in self.adapters.adapted), dtype
        )

    def _gather(self) -> AdapterFolder:
        network = self.weights.network
        network.gather_weights()
        with network.layout.activate():
            return gather_adapters(self.adapters)


@dataclass(frozen=True)
class NetworkLoader:
    """Loads networks on all ranks at the same time. They have the same number of ranks, and sizes of their own."""

    device: str
    world: int

    def make_layout(self, config: MegatronConfig, files: ModelFiles, key: str) -> MegatronLayout:
        """Make the process groups of a model. ``key``: of its section. Raises ValueError for sizes that do not divide it."""
        if (shape := ModelShape.from_hf(files.name, files.config.to_dict())) is not None:
            raise_problems(model_errors(config, key, shape))
        return MegatronLayout(
            MegatronDims.from_config(config, self.world), self.device, gloo_groups=config.use_gloo_process_groups
        )

    def load(
        self,
        files: ModelFiles,
        config: MegatronConfig,
        layout: MegatronLayout,
        *,
        dtype: torch.dtype,
        chunk: int | None,
        score: ScoreInit | None = None,
        adapter_seed: int | None = None,
        key: str = "megatron_cfg",
    ) -> MegatronNetwork:
        """Build this rank's stages and read their weights.

        Args:
            score: The initial score layer of a model with values; None is a language model.
            adapter_seed: Of the adapters that the section asks for; None leaves them out: the network is not trained.
        """
        stages = build_stages(files.config, config, layout, dtype=dtype, head="lm" if score is None else "scalar")
        prepare_schedule(stages[0].config)
        reader = FileWeights(files.folder)
        with layout.activate():
            load_weights(stages, files.config, reader, score_init=score or ScoreInit(seed=0))
            adapters = None
            if config.peft.enabled and adapter_seed is not None:
                adapters = StageAdapters(stages, files.config, config.peft, base=files.name, seed=adapter_seed, key=f"{key}.peft")
        return MegatronNetwork(stages, files.config, layout, chunk=chunk, adapters=adapters)


@dataclass(frozen=True)
class FrozenNetwork:
    """A network that only scores."""

    scorer: MegatronScorer
    offload: TensorOffload


def build_megatron_rank_models(
    config: TrainingRunConfig,
    algorithm: Algorithm,
    sampling: Sampling,
    total_steps: int | None,
    policy: MegatronPolicy,
    device: str,
    world: int,
) -> RankModels:
    """Build the models of a run, each divided over ``world`` ranks as its section says. Raises ValueError for what cannot be divided so."""
    loader = NetworkLoader(device, world)
    layout = loader.make_layout(MegatronConfig.of(config.policy), policy.files, "policy.megatron_cfg")
    score = ScoreInit(config.training.seed) if config.trains_scores else None
    network = _load(loader, policy.files, config.policy, layout, score, adapter_seed=config.training.seed)
    if isinstance(config, RolloutRunConfig) and config.policy.router_replay.enabled:
        network.enable_router_replay()
    draft = DraftConfig.of(config.policy)
    if draft.enabled:
        head = MegatronDraftedPolicy(network).head.weight
        network.draft = draft.make_head(head, network.hf_config, config.training.seed)
        network.publishes_draft = config.policy.sends_draft
        policy.draft.head = network.draft
    networks = {"policy": network}
    tokens = config.policy.score_tokens
    scorers: dict[str, RankScorer] = {"untrained": MegatronScorer(network, sampling, tokens)}
    frozen: list[TensorOffload] = []
    if keeps_reference(config, algorithm) and network.adapters is not None:
        scorers["reference"] = MegatronScorer(network, sampling, tokens, network.adapters.disabled)
    elif keeps_reference(config, algorithm):
        reference = _freeze(
            _load(loader, policy.files, config.policy, layout, score), sampling, tokens, offload=config.policy.reference.offload
        )
        scorers["reference"] = reference.scorer
        frozen.append(reference.offload)
    if isinstance(config, PpoRunConfig):
        networks["value"] = _load_critic(config, policy, loader)

    def make(name: str, **options: Any) -> MegatronLearner:
        return MegatronLearner(networks[name], **options)

    learners = make_each_learner(config, networks, algorithm, sampling, total_steps, make)
    columns: dict[tuple[str, str], RankColumns] = {}
    if isinstance(config, DistillationRunConfig):
        columns, teachers = _load_teachers(config, policy, algorithm, sampling, loader)
        frozen += teachers
    trained_parts = [part for learner in learners.values() for part in (learner.state_offload, learner.weight_offload)]
    return RankModels(
        weights=StageWeights(network),
        learners=learners,
        scorers=scorers,
        columns=columns,
        offload=ModelOffload([*trained_parts, *frozen]),
    )


def _load(
    loader: NetworkLoader,
    files: ModelFiles,
    config: ModelConfig,
    layout: MegatronLayout,
    score: ScoreInit | None,
    *,
    adapter_seed: int | None = None,
    section: str = "policy",
) -> MegatronNetwork:
    return loader.load(
        files,
        MegatronConfig.of(config),
        layout,
        dtype=PRECISIONS[config.precision],
        chunk=config.logprob_chunk_size,
        score=score,
        adapter_seed=adapter_seed,
        key=f"{section}.megatron_cfg",
    )


def _freeze(network: MegatronNetwork, sampling: Sampling, tokens: int, *, offload: bool) -> FrozenNetwork:
    """Make the scorer of a network that is not trained. ``offload``: keep it in CPU memory between uses."""
    for stage in network.stages:
        stage.requires_grad_(False)
        stage.eval()
    memory = TensorOffload(
        lambda: [tensor for stage in network.stages for tensor in (*stage.parameters(), *stage.buffers())], network.device
    )
    if not offload or network.device.type == "cpu":
        return FrozenNetwork(MegatronScorer(network, sampling, tokens), memory)
    memory.offload()
    return FrozenNetwork(MegatronScorer(network, sampling, tokens, memory.on_device), memory)


def _load_critic(config: PpoRunConfig, policy: MegatronPolicy, loader: NetworkLoader) -> MegatronNetwork:
    """Load the critic, in its own layout. Its scores begin at 0."""
    value = config.value
    if value.tokenizer.name != config.policy.tokenizer.name:
        check_same_vocabulary(policy.tokenizer, value.tokenizer.name)
    try:
        files = find_model_files(value.model_name, value.hf_config_overrides)
    except ModelNotFound as error:
        raise error.with_key("value.model_name") from error
    files.become_classifier()
    layout = loader.make_layout(MegatronConfig.of(value), files, "value.megatron_cfg")
    score = ScoreInit(config.ppo.seed, deviation=0.0)
    return _load(loader, files, value, layout, score, adapter_seed=config.ppo.seed, section="value")


def _load_teachers(
    config: DistillationRunConfig, policy: MegatronPolicy, algorithm: Algorithm, sampling: Sampling, loader: NetworkLoader
) -> tuple[dict[tuple[str, str], RankColumns], list[TensorOffload]]:
    """Load the teachers without separate processes: by Megatron Core where their section requests it, else by PyTorch.

    Raises ModelNotFound, ValueError."""
    wanted = find_teacher_columns(config, algorithm)
    columns: dict[tuple[str, str], RankColumns] = {}
    frozen: list[TensorOffload] = []
    for key, teacher in config.all_teachers.items():
        if teacher.hosts or not (section := MegatronConfig.of(teacher)).enabled:
            continue
        try:
            files = find_model_files(teacher.model_name, {})
        except ModelNotFound as error:
            raise error.with_key(f"{key}.model_name") from error
        tokenizers = (policy.tokenizer, load_tokenizer(teacher.tokenizer.name, key=f"{key}.tokenizer.name"))
        shared = shared_vocabulary_size(policy.vocab_size, files.vocab_size, tokenizers)
        layout = loader.make_layout(section, files, f"{key}.megatron_cfg")
        network = loader.load(files, section, layout, dtype=PRECISIONS[teacher.precision], chunk=1024)
        found = _freeze(
            network,
            unfiltered_sampling(sampling, wanted),
            teacher.logprob_mb_tokens or config.policy.score_tokens,
            offload=teacher.offload,
        )
        frozen.append(found.offload)
        columns |= {(key, column): make_source(column, found.scorer, config, shared) for column in wanted}
    torch_columns = load_rank_teachers(config, policy, algorithm, sampling, loader.device, loader.world)
    for name, (source, scorer) in torch_columns.items():
        assert scorer.parallelism is not None
        frozen.append(TensorOffload(scorer.parallelism.weight_tensors, scorer.network.device))
        columns[name] = source
    return columns, frozen

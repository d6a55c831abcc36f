"""Functions that build the Megatron Core models of a rank: each reads its shards from the files of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.algorithms.base import Algorithm
from strop.config import TrainingRunConfig
from strop.config.schema.run_config import (
    DistillationRunConfig,
    PpoRunConfig,
    RmRunConfig,
    RolloutRunConfig,
)
from strop.distributed.workers.learner_worker import RankColumns, RankModels, RankScorer
from strop.extensions.labs.draft.draft_config import DraftConfig
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_draft import MegatronDraftedPolicy
from strop.extensions.megatron.megatron_learner import MegatronLearner
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.extensions.megatron.megatron_policy import MegatronPolicy
from strop.extensions.megatron.megatron_scorer import MegatronScorer
from strop.extensions.megatron.model_files import ModelFiles, find_model_files
from strop.extensions.megatron.network_loader import NetworkLoader
from strop.extensions.megatron.stage_weights import StageWeights
from strop.extensions.megatron.weights.shard_import import ScoreInit
from strop.learner.model_config import ModelConfig
from strop.learner.torch.teacher import shared_vocabulary_size
from strop.learner.torch.tensor_offload import ModelOffload, TensorOffload
from strop.models.loading import ModelNotFound, load_tokenizer
from strop.runs.cluster.torch_rank_builders import keeps_reference, load_rank_teachers
from strop.runs.models import PRECISIONS, check_same_vocabulary, make_each_learner
from strop.runs.teachers import StudentInfo, find_scorer, find_teacher_columns, make_source, unfiltered_sampling
from strop.sampling import Sampling


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
    score = ScoreInit(config.training.seed) if isinstance(config, RmRunConfig) else None
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
    tokens = config.policy.batching.logprob_mb_tokens
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
        found = _freeze(network, unfiltered_sampling(sampling, wanted), teacher.logprob_mb_tokens, offload=teacher.offload)
        frozen.append(found.offload)
        columns |= {(key, column): make_source(column, found.scorer, config, shared) for column in wanted}
    others = {key: teacher for key, teacher in config.all_teachers.items() if teacher.uses_torch}
    student = StudentInfo(policy.vocab_size, policy.tokenizer)
    torch_columns = load_rank_teachers(config, others, student, algorithm, sampling, loader.device, loader.world)
    for source in torch_columns.values():
        scorer = find_scorer(source)
        assert scorer.parallelism is not None
        frozen.append(TensorOffload(scorer.parallelism.weight_tensors, scorer.network.device))
    return columns | torch_columns, frozen

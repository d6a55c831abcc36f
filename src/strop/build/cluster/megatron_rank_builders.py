"""Functions that build the Megatron Core models of a rank: each reads its shards from the files of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from strop.algorithms.base import Algorithm
from strop.build.algorithm.run_algorithm import count_steps_per_batch
from strop.build.cluster.torch_rank_builders import keeps_reference
from strop.build.lifecycle import seed_everything
from strop.build.models import PRECISIONS, TokenizerBundle, prepare_device, select_device, tokenizer_key
from strop.build.teachers import find_teacher_columns, make_source, unfiltered_sampling
from strop.config import TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, PpoRunConfig, RmRunConfig, RolloutRunConfig
from strop.distributed.workers.learner_worker import RankColumns, RankModels, RankScorer
from strop.learner.megatron.cpu_shim import prepare_megatron
from strop.learner.megatron.megatron_learner import MegatronLearner
from strop.learner.megatron.megatron_scorer import MegatronScorer
from strop.learner.megatron.model_files import ModelFiles, find_model_files
from strop.learner.megatron.network_loader import NetworkLoader
from strop.learner.megatron.stage_weights import StageWeights
from strop.learner.torch.teacher import shared_vocabulary_size
from strop.learner.torch.tensor_offload import ModelOffload, TensorOffload
from strop.models.chat_template import ChatTemplate
from strop.models.loading import ModelNotFound, load_tokenizer
from strop.sampling import Sampling


@dataclass(frozen=True, eq=False)
class MegatronPolicy(TokenizerBundle):
    """What a rank knows of the policy before its stages are built."""

    files: ModelFiles
    vocab_size: int  # of the output layer; 0 for a reward model

    packed = True  # core attention follows the tree of any row
    fallback = None

    def fingerprint(self) -> str:
        return self.files.fingerprint()


def load_megatron_policy(config: TrainingRunConfig) -> MegatronPolicy:
    """Find the policy's files and load its tokenizer. Raises ModelNotFound, ValueError."""
    seed_everything(config.training.seed)
    policy = config.policy
    select_device(policy.device)
    prepare_megatron(prepare_device(policy.device, policy.num_threads).type)
    files = find_model_files(policy.model_name, policy.hf_config_overrides)
    tokenizer = load_tokenizer(policy.tokenizer.name, chat_template=policy.tokenizer.chat_template, key=tokenizer_key(policy))
    template = ChatTemplate(tokenizer, options=policy.tokenizer.chat_template_kwargs)
    vocab_size = 0 if isinstance(config, RmRunConfig) else files.vocab_size
    return MegatronPolicy(tokenizer, template, files.stop_ids(tokenizer), files, vocab_size)


def write_megatron_model_folder(policy: MegatronPolicy, folder: Path) -> Path:
    """Write the folder that engines build the model from: configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.files.config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


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
    learners = {"policy": make_learner(...)}

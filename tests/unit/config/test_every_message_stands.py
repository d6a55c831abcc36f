"""No message to the user is lost: those of ``tests/golden/messages.txt`` still occur in the source, or a table here says why not.

A message is a string in ``raise X(...)``, ``Problem(...)`` or ``ValueError(...)``, or a string that is yielded, with ``{}`` for what an
f-string fills in. ``PYTHONPATH=tests python tests/unit/config/test_every_message_stands.py src/strop > tests/golden/messages.txt`` lists
those of a tree.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.source_trees import children, parse_package, walk, without_collecting

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "messages.txt"

# A rule about an algorithm has one owner, its ``validate``, which says what a check of the configuration said a second time.
ON_POLICY = (
    "on_policy_ratio (loss_fn.force_on_policy_ratio) sets the ratio to 1, but there are {} optimizer steps per batch, and from the second "
    "on the ratio is not 1; set it to false, or run one optimizer step per batch"
)
CLIP = (
    "advantages are clipped to [{}, {}], which is empty; set advantage_clip_low below advantage_clip_high, or one of them to null"
)
CONSTANT_LENGTH = (
    "aggregation constant_length divides by constant_length, which is not set; set it (loss_fn.constant_length), for instance to "
    "${policy.generation.max_new_tokens}"
)
SEQUENCE_LEVEL = (
    "{} has one ratio per rollout, so a mean over tokens gives long rollouts more weight; set aggregation sequence_mean "
    "(loss_fn.token_level_loss=false, as GSPO does)"
)
ASYNCHRONOUS = "the ratio is to the learner before the update, so the age of rollouts does not matter"
# The rule is the section's; it is asked with the configured device, and by a run with the one it has.
SLEEPS = (
    "found true, but asynchronous training samples while the learner trains, and an engine on the learner's GPU sleeps meanwhile"
)
NCCL = "found broadcast, but {}.colocated.enabled is true: NCCL does not connect two processes on one GPU"
NOT_DIVIDED = "found {}, with {}: these {} ranks do not divide {}"
NONE_TRAINS = (
    "policy.generation.colocated.enabled is false, and generation takes {} of cluster.gpus_per_node {}: none is left to train. Raise "
    "cluster.gpus_per_node, lower {}.gpus_per_node, set {}.num_nodes if there are several nodes, or set colocated.enabled=true"
)

STAGES = "pipeline stages are read back as well"
LARGER_THAN_A_NODE = (
    "an engine of {} devices (policy.generation.vllm_cfg.tensor_parallel_size x pipeline_parallel_size) does not fit: {} devices of a node "
    "generate, on {} nodes, and an engine that is larger than a node takes whole nodes. Lower it, make it a multiple of {}, or raise "
    "cluster.gpus_per_node or cluster.num_nodes"
)

EXPERT_RANKS = (
    "found {}, but an engine divides its experts over all ranks of its copies, of {}.tensor_parallel_size = {} ranks each"
)

EXPERTS = "experts are read back"

# The old message -> what says it now.
WEIGHTS = "{}the weights in {} do not fit {}: {}. {}"  # of every load, with all names
REWORDED: dict[str, str] = {
    "tensor_parallel_size {} does not divide the {} {} of {}, and a head cannot be split; set it to a divisor of {}": (
        "tensor_parallel_size {} does not divide the {} {} of {}, and a head cannot be split; set it to one of {}"
    ),
    # Asked of the configuration, with the other packages:
    "this run trains on {} devices (cluster.gpus_per_node, cluster.num_nodes), which requires Ray, and Ray cannot be imported here ({}): "
    "pip install 'strop[ray]', or set cluster.backend=local and one device": (
        "found {} with {} x {} devices (cluster.num_nodes, cluster.gpus_per_node), whose processes are actors of Ray, which is not "
        "installed"
    ),
    "policy.model_name: {} lacks weights of {}: {}": WEIGHTS,
    "the weights do not fit {}: of {} weights, missing {}, unexpected {}": WEIGHTS,
    "the weights in {} do not fit the model: missing {}, unexpected {}, of another shape {}": WEIGHTS,
    "the weights in {} do not fit the model: {}": WEIGHTS,
    "{}: importing {} failed: {}: {}": "{}: importing {} failed: {}",  # type, text and place together
    "{}; it was restarted {} times without completing a request (policy.generation.vllm_cfg.max_restarts), so another restart will not "
    "help: see the engine's own output for the cause": (
        "{}; it was restarted {} times without completing a request (policy.generation.{}.max_restarts), so another restart will not "
        "help: see the engine's own output for the cause"
    ),
    "{} holds {}, which is not text; only text conversations can be trained on": (
        "{} holds {}, which is not text; only text and images can be trained on"
    ),
    "found {}, but this version uses {}; the others stay idle": "found {}, but {}; the others stay idle",
    "an engine of {} devices (policy.generation.vllm_cfg.tensor_parallel_size) does not fit on a node: at most {} devices of a node "
    "generate. Lower it, or raise cluster.gpus_per_node": LARGER_THAN_A_NODE,
    "the environment {} has no option {}{}": "{} has no option {}{}",  # of environments and verifiers
    "the environment {} needs the option {}; set it": "{} needs the option {}; set it",
    "the option {} of the environment {} is {}: {}": "the option {} of {} is {}: {}",
    "found {}, with context_parallel_size = {} and dp_replicate_size = {}: these {} ranks do not divide {}": NOT_DIVIDED,
    "found {}, but no checkpoints are saved: checkpointing.{} is {}": (
        "it has no effect: no checkpoints are saved: checkpointing.{} is {}"
    ),
    "algorithm.kwargs: {} needs {}": "{}: {} needs {}",  # of algorithms and parts
    "policy.model_name: {} has the shards of a distributed checkpoint; convert them first: python examples/converters/convert_dcp_to_hf.py "
    "--dcp-ckpt-path {} --hf-ckpt-path FOLDER": (
        "policy.model_name: {} has the shards of a distributed checkpoint; convert them first: strop export {} FOLDER, or "
        "python examples/converters/convert_dcp_to_hf.py --dcp-ckpt-path {} --hf-ckpt-path FOLDER"
    ),
    "{} has no adapters to disable, so it cannot be its own reference; use a FrozenScorer with a copy": (
        "{} has no adapters to disable, so it cannot be its own reference; use a frozen copy (copy_frozen)"
    ),
    "{}.model_name is self, which works in one process only: ranks hold shards of the policy. Name a model, or set "
    "cluster.backend=local": "found self, which works in one process only: ranks hold shards of the policy",
    "{}: its process died while generating{}": "{}: its process died {}{}",
    "policy.generation.backend is vllm, and vLLM cannot be imported here ({}): install it (`pip install vllm`, or `make setup-vllm` on a "
    "machine without a GPU), or set policy.generation.backend=torch": (
        "policy.generation.backend is vllm, and vLLM cannot be imported here (No module named 'vllm'): install it (`make setup-vllm` in "
        "Strop's checkout takes the build for this machine), or set policy.generation.backend=torch"
    ),
    "found 1, but a leave-one-out baseline is the mean of the other rollouts of the group, and a group of one has none": (
        "a leave-one-out baseline is the mean of the other rollouts of the group, and a group of one has none"
    ),
    "found 1, but a reward minus the mean of a group of one is always 0, so there is nothing to learn": (
        "a reward minus the mean of a group of one is always 0, so there is nothing to learn"
    ),
    "found 1, but a group of one has no standard deviation to normalise by": (
        "a group of one has no standard deviation to normalise by"
    ),
    "Set it to 2 or more, or grpo.minus_baseline=false and grpo.normalize_rewards=false.": (
        "grpo.minus_baseline=false and grpo.normalize_rewards=false"
    ),
    "Set it to 2 or more, or grpo.normalize_rewards=false.": "grpo.normalize_rewards=false",
    "Set it to 2 or more, or grpo.use_leave_one_out_baseline=false.": "grpo.use_leave_one_out_baseline=false",
    "found 1, but dynamic sampling drops groups with equal rewards: every group of one": (
        "dynamic sampling drops groups with equal rewards, and a group of one always has equal rewards"
    ),
    "Set it to 2 or more, or grpo.use_dynamic_sampling=false.": "raise num_generations_per_prompt, or set use_dynamic_sampling=false",
    "found {}, above advantage_clip_high = {}": CLIP,
    "Lower it, or set one of them to null.": CLIP,
    "found null, but loss_fn.aggregation is constant_length, which divides by it": CONSTANT_LENGTH,
    "aggregation constant_length divides by constant_length, which is not set; set it, for instance to max_new_tokens": CONSTANT_LENGTH,
    "Set it, for instance to ${policy.generation.max_new_tokens}.": CONSTANT_LENGTH,
    "found true, but a ratio per sequence and a mean over tokens weigh long sequences twice": SEQUENCE_LEVEL,
    "Set loss_fn.token_level_loss=false (GSPO).": SEQUENCE_LEVEL,
    "found true, but a batch makes several optimizer steps, and from the second on the ratio is not 1": ON_POLICY,
    "on_policy_ratio sets the ratio to 1, but there are {} optimizer steps per batch, and from the second on the ratio is not 1; set it to "
    "false, or run one optimizer step per batch": ON_POLICY,
    "found true, but {}.async_{} samples while the learner trains, and an engine on the learner's GPU sleeps meanwhile": SLEEPS,
    "policy.generation.colocated.enabled is true and training is asynchronous: an engine on the learner's GPU must sleep while the learner "
    "trains. Set it to false, with a GPU for each engine, or train synchronously": SLEEPS,
    "found broadcast, but policy.generation.colocated.enabled is true: NCCL does not connect two processes on one GPU": NCCL,
    "policy.generation.weight_sync.transport is broadcast, and NCCL does not connect two processes on one GPU: set it to auto, or "
    "policy.generation.colocated.enabled=false": NCCL,
    "tensor_parallel_size {} x context_parallel_size {} x dp_replicate_size {} do not divide the {} training devices; lower them, or "
    "change cluster.gpus_per_node or cluster.num_nodes": NOT_DIVIDED,
    "found false, and generation would take all {} devices of each node, which leaves none to train": NONE_TRAINS,
    "Raise cluster.gpus_per_node (without GPUs, processes take their place), or lower "
    "policy.generation.colocated.resources.gpus_per_node.": NONE_TRAINS,
    # Asked of the configuration, not only of a run whose models are loaded:
    "{}.demonstration: found null, and without a demonstration the policy and its teacher are the same model; set it": (
        "found null, and without a demonstration the policy and its teacher are the same model"
    ),
    "{}.demonstration: only the policy as its own teacher uses it; set {}.model_name=self, or the demonstration to null": (
        "only the policy as its own teacher uses it"
    ),
    "{}.environments: found {}, but env has {}": "found {}, but env has {}",
    "{}.self_weights: found ema, but there is no moving average; set policy.ema.enabled=true": (
        "found ema, but there is no moving average"
    ),
    "teachers: several teachers are for all environments, and the top-k tokens of their mixture are unknown; give each its environments "
    "(teachers.NAME.environments), or set algorithm.name=distillation": (
        "several teachers are for all environments, and the top-k tokens of their mixture are unknown"
    ),
    "Set {}.megatron_cfg.enabled=false and {}.dtensor_cfg.enabled=true for the torch learner.": (
        "Set policy.backend=torch to train it with the torch learner, which takes over what megatron_cfg says."
    ),
    "found true with tensor_parallel_size = 1: there are no ranks to shard the sequence over": (
        "it has no effect: tensor_parallel_size is 1, so there are no ranks to shard the sequence over"
    ),
    # How an extra is installed is said in one place (strop.packages), and the section's key is filled in:
    "Run pip install 'strop[lora]', or set {}.dtensor_cfg.lora_cfg.enabled=false.": "Run {}, or set {}.enabled=false.",
    "Run pip install 'strop[{}]', or set logger.{}_enabled=false.": "Run {}, or set {}.{}_enabled=false.",
    "dtensor_cfg.lora_cfg.enabled needs the package peft: pip install 'strop[lora]', or set it to false": (
        "dtensor_cfg.lora_cfg.enabled needs the package peft: {}, or set it to false"
    ),
    "`make setup-vllm` installs it, `pip install vllm` on a machine with a GPU; or set {}.backend=torch.": (
        "`make setup-vllm` in Strop's checkout installs the build for this machine; or set {}.backend=torch."
    ),
    "Set it to auto or cuda_ipc, or policy.generation.colocated.enabled=false.": (
        "Set it to auto or cuda_ipc, or {}.colocated.enabled=false."
    ),
    "Set it to memory or folder, or policy.generation.vllm_cfg.num_engines=1.": (
        "Set it to memory or folder, or {}.vllm_cfg.num_engines=1."
    ),
    "Set {}.optimizer.kwargs.lr, for instance to 5e-6.": "Set {}.kwargs.lr, for instance to 5e-6.",
    "found cuda_ipc, but policy.generation.colocated.enabled is false: an engine on other GPUs cannot map the learner's memory": (
        "found cuda_ipc, but {}.colocated.enabled is false: an engine on other GPUs cannot map the learner's memory"
    ),
    "found {}, but an engine shards its experts over its tensor-parallel ranks, and {}.vllm_cfg.tensor_parallel_size is {}": (
        EXPERT_RANKS
    ),
    "it has no effect: {}.vllm_cfg.speculation.method is {}": "it has no effect: {}.method is {}",
}

# The old message -> why nothing says it any more.
DROPPED: dict[str, str] = {
    "the weights of experts are not read back from the engine: only what the engine received and the canary verify them": EXPERTS,
    "policy.generation.weight_sync.proof=always samples the canary after every publish.": EXPERTS,
    "each layer has {} attention heads on a rank, which cannot be split evenly among {} context ranks; set context_parallel_size to a "
    "divisor of {}": "keys and values go around a ring",
    "attention sinks are not supported by packed attention": "they are",
    "{} has weight 0, but every assistant message is trained on; end the conversation before it": "it is read and not trained on",
    "found {} with cluster.backend = {}, but an evaluation runs on one machine, without Ray, in this version": "it runs on any, over Ray",
    "Set cluster.num_nodes=1 and cluster.backend=auto.": "an evaluation runs on several nodes",
    "found {}, but this version does not have engines with pipeline parallelism: it cannot verify their weights": STAGES,
    "Set it to 1, and {}.vllm_cfg.tensor_parallel_size for a model that needs several GPUs.": STAGES,
    "{} has {}, which would be lost: only role and content are read; {}": "calls of tools and reasoning are read",
    "found true, but with {}.async_{} rollouts come from older weights, so the ratio is not 1": ASYNCHRONOUS,
    "Set loss_fn.force_on_policy_ratio=false, or {}.async_{}.enabled=false.": ASYNCHRONOUS,
    "Strop does not have this key of NeMo-RL": "the rules of strop.config.recipes say of each key why",
    "{}{}. Remove the key.": "the rules of strop.config.recipes say of each key what to do",
    "{}.scheduler: {} stages need {} milestones between them; found {}": "the section says it, and no scheduler is built without one",
    "found true, but padded dynamic batching is not in this version": "a rule of strop.config.recipes packs instead",
    "Set it to false and {}.sequence_packing.enabled=true, which has token budgets without padding.": "a rule does so",
    "found true, but the Megatron Core learner backend is not in this version": "it is in this version",
    "a batch that is only scored has no loss": "a batch that is only scored is packed without an algorithm",
    "a coroutine of a rank suspended; local learners must not await anything": "learners are no coroutines",
    "dtensor_cfg.lora_cfg.lora_A_init: {} is unknown{}": "the section's type says which values there are",
    "dtensor_cfg.lora_cfg: found dim = {}, alpha = {}, dropout = {}; dim must be at least 1, alpha above 0, dropout at least 0 and "
    "below 1": ("the section's limits say it, key by key"),
    "messages_key and input_key or output_key are both set; keep the one to train on": (
        "both may be set: messages are read where the data has them, as NeMo-RL's ResponseDataset reads them"
    ),
}


def templates(node: ast.AST) -> Iterator[str]:
    """Every string below a node as a template, with single spaces; not the strings inside the placeholders of another."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield " ".join("".join(parts).split())
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield " ".join(node.value.split())
    else:
        for child in children(node):
            yield from templates(child)


def find_messages(tree: ast.AST) -> set[str]:
    """The messages of a file: templates of several words."""
    found: set[str] = set()
    for node in walk(tree):
        match node:
            case ast.Raise(exc=ast.AST() as said) | ast.Yield(value=ast.JoinedStr() | ast.Constant() as said):
                found.update(templates(said))
            case ast.Call(func=ast.Name(id="Problem" | "ValueError")):
                found.update(templates(node))
    return {template for template in found if " " in template}


@cache
def said() -> str:
    """All strings of the source."""
    with without_collecting():
        return "\n".join({template for tree in parse_package().values() for template in templates(tree)})


def missing(wanted: list[str]) -> list[str]:
    """The messages that stand in no string of the source."""
    return [message for message in wanted if message not in said()]


def old_messages() -> list[str]:
    return GOLDEN.read_text(encoding="utf-8").splitlines()


def test_every_message_stands_or_a_table_says_why_not() -> None:
    assert len(old_messages()) > 700
    lost = [message for message in missing(old_messages()) if message not in REWORDED and message not in DROPPED]
    assert not lost, "\n".join(lost)


def test_what_was_reworded_is_said_in_the_new_words() -> None:
    assert missing(list(REWORDED.values())) == []


def test_the_tables_name_old_messages_that_are_gone() -> None:
    assert set(REWORDED) | set(DROPPED) <= set(old_messages()) and not set(REWORDED) & set(DROPPED)
    assert sorted(missing([*REWORDED, *DROPPED])) == sorted([*REWORDED, *DROPPED])


if __name__ == "__main__":
    print("\n".join(sorted(set().union(*(find_messages(tree) for tree in parse_package(Path(sys.argv[1])).values())))))

"""Resolved values of NeMo-RL's recipes side by side: what NeMo-RL's own code makes of each, and what Strop makes of it.

python benchmarks/recipes_vs_nemo_rl.py CHECKOUT            at most 12 recipes of each kind of run
python benchmarks/recipes_vs_nemo_rl.py CHECKOUT --most 999 --output table.json

Compared are learning rates over 200 training steps, batch sizes and optimizer steps, parallel sizes, sampling, and, of policy gradients,
the loss and its gradient, from the rewards on, for the same random rollouts (sampler, learner before the update, policy and reference all
different). Learning rates of Megatron recipes need `pip install megatron-core`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from nemo_rl_code import NemoRl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conformance.cases import Step, step
from conformance.harness import through_strop
from strop.config import ConfigError, EvalRunConfig, RolloutRunConfig, TrainingRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS, list_trained_models
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.learner.model_config import ModelConfig
from strop.learner.torch.optimizer import make_optimizer, make_scheduler
from strop.runs.run_algorithm import count_steps_per_batch, make_run_algorithm

STEPS = 200  # training steps whose learning rates are compared
KINDS = ("distillation", "ppo", "grpo", "sft", "dpo", "rm", "eval")
ROLLOUTS = [[3, 5, 2, 4], [4, 1, 6, 2], [7, 3, 3, 5]]  # tokens


@dataclass
class Comparison:
    """One value of a recipe on both sides; ``off``: how far they are apart, 0 for equal ones."""

    name: str
    theirs: Any
    ours: Any
    off: float


@dataclass
class Compared:
    """One recipe."""

    recipe: str
    kind: str
    as_is: bool  # without policy.backend=torch
    values: list[Comparison] = field(default_factory=list)

    def compare(self, name: str, theirs: Any, ours: Any) -> None:
        self.values.append(Comparison(name, theirs, ours, 0.0 if theirs == ours else float("inf")))

    def compare_numbers(self, name: str, theirs: Tensor, ours: Tensor) -> None:
        scale = theirs.abs().max().item() or 1.0
        off = (theirs - ours).abs().max().item() / scale
        self.values.append(Comparison(name, theirs.flatten()[:3].tolist(), ours.flatten()[:3].tolist(), off))


def find_recipes(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted((folder / "examples").rglob("*.y*ml")):
        yield path, path.stem


def kind_of(recipe: Mapping[str, Any]) -> str | None:
    return next((kind for kind in KINDS if kind in recipe), None)


def load_here(path: Path, kind: str) -> tuple[TrainingRunConfig, bool] | None:
    for overrides in ([], ["policy.backend=torch"]):
        try:
            return load_config(path, overrides, root=TRAINING_RUNS[kind]).config, not overrides
        except ConfigError:
            continue
    return None


def compare(nemo: NemoRl, path: Path, name: str) -> Compared | None:
    """Return the comparison of one recipe; None if Strop refuses it, or NeMo-RL's loader needs what is not there."""
    try:
        recipe = nemo.load(path)
    except Exception:  # an environment variable, or a file that is no recipe
        return None
    if "eval" in recipe:
        return compare_evaluation(recipe, path, name)
    kind = kind_of(recipe)
    loaded = load_here(path, kind) if kind else None
    if kind is None or loaded is None:
        return None
    config, as_is = loaded
    found = Compared(name, kind, as_is)
    compare_batches(found, recipe, config)
    compare_rates(found, nemo, recipe, config)
    compare_layout(found, recipe, config)
    if isinstance(config, RolloutRunConfig):
        compare_sampling(found, recipe, config)
        if isinstance(config, DistillationRunConfig):
            compare_keys(found, DISTILLATION_KEYS, recipe["loss_fn"], config.loss_fn)
            compare_keys(found, ("topk_logits_k",), recipe["distillation"], config.distillation)
        else:
            compare_losses(found, nemo, recipe, config)
    else:
        compare_keys(found, RECORDED_KEYS, recipe[kind], config.training)
    return found


def compare_evaluation(recipe: Mapping[str, Any], path: Path, name: str) -> Compared | None:
    try:
        config = load_config(path, root=EvalRunConfig).config
    except ConfigError:
        return None
    found = Compared(name, "eval", as_is=True)
    compare_keys(found, ("num_tests_per_prompt", "seed", "k_value", "metric"), recipe["eval"], config.eval)
    compare_keys(
        found, ("temperature", "top_p", "top_k", "max_new_tokens", "model_name"), recipe["generation"], config.generation
    )
    sizes = [recipe["generation"]["vllm_cfg"]["tensor_parallel_size"], config.generation.vllm_cfg.tensor_parallel_size]
    found.compare("engine's tensor parallel", *sizes)
    return found


def compare_batches(found: Compared, recipe: Mapping[str, Any], config: TrainingRunConfig) -> None:
    section = recipe[found.kind]
    if isinstance(config, RolloutRunConfig):
        rollouts = section["num_prompts_per_step"] * section["num_generations_per_prompt"]
        found.compare("rollouts per step", rollouts, config.rollout_training.rollouts_per_step)
        epochs = section.get("ppo_epochs", 1) if found.kind == "ppo" else 1
        steps = -(-rollouts // recipe["policy"]["train_global_batch_size"]) * epochs
        found.compare("optimizer steps per step", steps, count_steps_per_batch(config) * config.rollout_training.epochs_per_batch)
    else:
        found.compare("examples per step", recipe["policy"]["train_global_batch_size"], config.policy.train_global_batch_size)
    for name in ("max_num_steps", "max_num_epochs", "val_period", "seed"):
        theirs, ours = section.get(name), getattr(config.training, name, None)
        endless = theirs in (None, -1) and ours in (None, 0, -1)
        found.compare(name, theirs, theirs if endless else ours)
    found.compare(
        "max_total_sequence_length", recipe["policy"]["max_total_sequence_length"], config.policy.max_total_sequence_length
    )
    megatron = recipe["policy"].get("megatron_cfg", {})
    norm = megatron["optimizer"]["clip_grad"] if megatron.get("enabled") else recipe["policy"]["max_grad_norm"]
    found.compare("max_grad_norm", norm or None, config.policy.max_grad_norm)


def compare_rates(found: Compared, nemo: NemoRl, recipe: Mapping[str, Any], config: TrainingRunConfig) -> None:
    models = dict(list_trained_models(config))
    steps = (
        1
        if not isinstance(config, RolloutRunConfig)
        else count_steps_per_batch(config) * config.rollout_training.epochs_per_batch
    )
    for key, model in models.items():
        theirs = nemo.learning_rates(recipe[key], STEPS)
        if theirs is not None:
            ours = learning_rates(model, steps)
            found.compare_numbers(f"{key}: learning rate", torch.tensor(theirs), torch.tensor(ours))
        found.compare(f"{key}: optimizer", optimizer_of(recipe[key]), optimizer_here(model))


def learning_rates(model: ModelConfig, optimizer_steps: int) -> list[float]:
    """Return the learning rate of the first optimizer step of each training step."""
    optimizer = make_optimizer(model.optimizer, [("weight", torch.nn.Parameter(torch.zeros(1, 1)))])
    scheduler = make_scheduler(model.scheduler, optimizer)
    unit = getattr(model, "scheduler_unit", "optimizer_step")
    rates = []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        for _ in range(optimizer_steps if unit == "optimizer_step" else 1):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return rates


def optimizer_of(model: Mapping[str, Any]) -> dict[str, Any]:
    if model["megatron_cfg"]["enabled"]:
        options = model["megatron_cfg"]["optimizer"]
        return {
            "weight_decay": model["megatron_cfg"]["scheduler"]["start_weight_decay"],  # which is set before every step
            "betas": [options["adam_beta1"], options["adam_beta2"]],
            "eps": float(options["adam_eps"]),
        }
    options = model["optimizer"]["kwargs"]
    return {"weight_decay": options.get("weight_decay"), "betas": options.get("betas"), "eps": float(options.get("eps", 1e-8))}


def optimizer_here(model: ModelConfig) -> dict[str, Any]:
    options = model.optimizer.kwargs
    betas = options.get("betas")
    return {
        "weight_decay": options.get("weight_decay"),
        "betas": None if betas is None else list(betas),
        "eps": float(options.get("eps", 1e-8)),
    }


def compare_layout(found: Compared, recipe: Mapping[str, Any], config: TrainingRunConfig) -> None:
    policy, ours = recipe["policy"], config.policy.dtensor_cfg
    if policy["megatron_cfg"]["enabled"]:
        theirs = policy["megatron_cfg"]
        sizes = [theirs["tensor_model_parallel_size"], theirs["context_parallel_size"]]
        experts = theirs.get("expert_model_parallel_size", 1)
    else:
        theirs = policy["dtensor_cfg"]
        sizes = [theirs["tensor_parallel_size"], theirs["context_parallel_size"]]
        experts = theirs.get("expert_parallel_size", 1)
    found.compare("tensor, context parallel", sizes, [ours.tensor_parallel_size, ours.context_parallel_size])
    found.compare("expert parallel", experts, ours.expert_parallel_size)
    devices = [recipe["cluster"]["num_nodes"], recipe["cluster"]["gpus_per_node"]]
    found.compare("nodes, GPUs of each", devices, [config.cluster.num_nodes, config.cluster.gpus_per_node])


def compare_sampling(found: Compared, recipe: Mapping[str, Any], config: RolloutRunConfig) -> None:
    theirs, ours = recipe["policy"]["generation"], config.policy.generation
    for name in ("temperature", "top_p", "top_k", "max_new_tokens"):
        found.compare(name, theirs[name], getattr(ours, name))
    if "vllm_cfg" in theirs:
        found.compare("engine's tensor parallel", theirs["vllm_cfg"]["tensor_parallel_size"], ours.vllm_cfg.tensor_parallel_size)


def compare_losses(found: Compared, nemo: NemoRl, recipe: Mapping[str, Any], config: TrainingRunConfig) -> None:
    """The whole way from rewards to a gradient, on the same rollouts."""
    random = step("side by side", ROLLOUTS)
    if recipe["loss_fn"].get("force_on_policy_ratio"):  # one optimizer step a batch: the policy is the learner before the update
        random = random.map(lambda sample: replace(sample, before=sample.now))
    algorithm = make_run_algorithm(config)
    columns, rewards, groups = padded(random)
    advantages = nemo.advantages(recipe, groups, rewards, columns)
    now = columns.pop("now").requires_grad_()
    theirs = nemo.policy_loss(recipe, now, columns, advantages)
    theirs.backward()  # type: ignore[no-untyped-call]
    ours = through_strop(algorithm, random)
    assert now.grad is not None
    found.compare_numbers("loss", theirs.detach(), torch.tensor(ours.value))
    found.compare_numbers("gradient", now.grad[columns["token_mask"].bool()], ours.gradients["logprobs"])


def padded(random: Step) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return columns [S, T] in NeMo-RL's names, rewards [S] and the number of each rollout's prompt [S]."""
    samples, longest = random.samples, max(sample.length for sample in random.samples)

    def column(name: str) -> Tensor:
        rows = [[*getattr(sample, name), *[0.0] * (longest - sample.length)] for sample in samples]
        return torch.tensor(rows)

    names = {
        "now": "now",
        "prev_logprobs": "before",
        "generation_logprobs": "sampler",
        "reference_policy_logprobs": "reference",
        "values": "value",
    }
    columns = {theirs: column(ours) for theirs, ours in names.items()}
    columns["token_mask"] = torch.tensor([[1.0] * sample.length + [0.0] * (longest - sample.length) for sample in samples])
    for part in samples[0].parts:
        columns[f"reward/{part}"] = torch.tensor([float(sample.parts[part]) for sample in samples])
    groups = torch.tensor([place for place, group in enumerate(random.groups) for _ in group])
    return columns, torch.tensor([float(sample.reward) for sample in samples]), groups


RECORDED_KEYS = (
    "reference_policy_kl_penalty",
    "preference_loss_weight",
    "sft_loss_weight",
    "preference_average_log_probs",
    "sft_average_log_probs",
)
DISTILLATION_KEYS = ("kl_type", "mixed_kl_weight", "zero_outside_topk")


def compare_keys(found: Compared, names: Sequence[str], theirs: Mapping[str, Any], ours: object) -> None:
    for name in names:
        if name in theirs:
            found.compare(name, theirs[name], getattr(ours, name))


def format_table(compared: list[Compared]) -> str:
    """Return a table: one line for each value, over all recipes of a kind."""
    lines = ["| kind | value | recipes | equal | largest difference | unlike in |", "|---|---|---|---|---|---|"]
    for kind in KINDS:
        of_kind = [recipe for recipe in compared if recipe.kind == kind]
        names = list(dict.fromkeys(value.name for recipe in of_kind for value in recipe.values))
        for name in names:
            pairs = [(recipe.recipe, value) for recipe in of_kind for value in recipe.values if value.name == name]
            unlike = [f"{recipe}: {value.theirs} / {value.ours}" for recipe, value in pairs if not value.off < 1e-6]
            largest = max((value.off for _, value in pairs if value.off < float("inf")), default=0.0)
            lines.append(f"| {kind} | {name} | {len(pairs)} | {len(pairs) - len(unlike)} | {largest:.1e} | {'; '.join(unlike)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with NeMo-RL")
    parser.add_argument("--most", type=int, default=12, help="recipes of each kind")
    parser.add_argument("--output", type=Path, help="where to write every value as JSON")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    nemo = NemoRl(options.checkout)
    compared: list[Compared] = []
    for path, name in find_recipes(options.checkout):
        found = compare(nemo, path, name)
        if found is not None and sum(other.kind == found.kind for other in compared) < options.most:
            compared.append(found)
    print(format_table(compared))
    if options.output:
        options.output.write_text(json.dumps([asdict(recipe) for recipe in compared], indent=1, default=str))


if __name__ == "__main__":
    main()

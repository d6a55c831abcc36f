"""NeMo-RL's own code, imported from a checkout on a machine that lacks most of what it depends on.

What is asked of it is arithmetic: configurations, advantages, losses, learning rates. Everything else is a stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch import Tensor

OPTIONAL = (
    "nemo_automodel",
    "hydra",
    "transformer_engine",
    "nemo_gym",
    "decord",
    "nvtx",
    "pynvml",
    "torchdata",
    "mlflow",
    "swanlab",
)
# Packages of NeMo-RL whose own imports need a GPU, or another version of a library.
HOLLOW = (
    "nemo_rl.models.policy",
    "nemo_rl.models.generation",
    "nemo_rl.distributed.virtual_cluster",
    "nemo_rl.models.dtensor.parallelize",
    "nemo_rl.algorithms.x_token.loss_utils",
)


class Hollow(ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class HollowFinder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class NemoRl:
    """NeMo-RL's functions, from ``folder``."""

    def __init__(self, folder: Path) -> None:
        sys.meta_path.append(HollowFinder(["megatron", *(name for name in OPTIONAL if find_spec(name) is None)]))
        sys.path.insert(0, str(folder))
        for name in HOLLOW:
            module = Hollow(name)
            module.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = module
        self._config = import_module("nemo_rl.utils.config")
        self._estimators = import_module("nemo_rl.algorithms.advantage_estimator")
        self._losses = import_module("nemo_rl.algorithms.loss.loss_functions")
        self._batches = import_module("nemo_rl.distributed.batched_data_dict")
        self._config.register_omegaconf_resolvers()

    def load(self, path: Path) -> dict[str, Any]:
        """Return a recipe as NeMo-RL resolves it."""
        from omegaconf import OmegaConf

        resolved: dict[str, Any] = OmegaConf.to_container(self._config.load_config(path), resolve=True)  # type: ignore[assignment]
        return resolved

    def loss_config(self, recipe: Mapping[str, Any]) -> Any:
        return self._losses.ClippedPGLossConfig(**recipe["loss_fn"])

    def advantages(self, recipe: Mapping[str, Any], groups: Tensor, rewards: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the advantage of each token, [S, T]. ``groups``: the prompt's number of each rollout, [S]."""
        section = recipe["ppo"] if "ppo" in recipe else recipe["grpo"]
        options = section["adv_estimator"]
        mask, loss = columns["token_mask"], self.loss_config(recipe)
        known = {"prompt_ids": groups[:, None], "rewards": rewards, "mask": mask}
        match options["name"]:
            case "gae":
                estimator = self._estimators.GeneralizedAdvantageEstimator(options, loss)
                found = estimator.compute_advantage(
                    **known,
                    values=columns["values"],
                    logprobs=columns["prev_logprobs"],
                    reference_logprobs=columns["reference_policy_logprobs"],
                )
                return found[0]  # type: ignore[no-any-return]
            case "reinforce_plus_plus":
                kind = self._estimators.ReinforcePlusPlusAdvantageEstimator
            case "gdpo":
                kind = self._estimators.GDPOAdvantageEstimator
            case _:
                kind = self._estimators.GRPOAdvantageEstimator
        parts = {name: columns[name] for name in columns if name.startswith("reward/")}
        found = kind(self._estimators.AdvEstimatorConfig(**options), loss).compute_advantage(
            **known,
            logprobs_policy=columns["prev_logprobs"],
            logprobs_reference=columns["reference_policy_logprobs"],
            repeated_batch=self._batches.BatchedDataDict(parts),
        )
        low, high = section.get("advantage_clip_low"), section.get("advantage_clip_high")
        return found if low is None and high is None else found.clamp(low, high)  # type: ignore[no-any-return]

    def policy_loss(
        self, recipe: Mapping[str, Any], logprobs: Tensor, columns: Mapping[str, Tensor], advantages: Tensor
    ) -> Tensor:
        """Return the loss. Every tensor is [S, T], and what stands at place t is of token t (the first is never predicted)."""
        shifted = {
            name: torch.cat([torch.zeros(len(column), 1), column], 1) for name, column in columns.items() if column.dim() == 2
        }
        rollouts = len(logprobs)
        data = {
            **shifted,
            "sample_mask": torch.ones(rollouts),
            "advantages": torch.cat([torch.zeros(rollouts, 1), advantages], 1),
        }
        function = self._losses.ClippedPGLossFn(self.loss_config(recipe))
        tokens = columns["token_mask"].sum()
        return function(logprobs, self._batches.BatchedDataDict(data), torch.tensor(float(rollouts)), tokens)[0]  # type: ignore[no-any-return]

    def learning_rates(self, model: Mapping[str, Any], steps: int) -> list[float] | None:
        """Return the learning rate of each training step, as the torch or the Megatron worker sets it; None without megatron-core."""
        if model["megatron_cfg"]["enabled"]:
            return self._megatron_rates(model["megatron_cfg"], steps)
        # Whatever the optimizer, its rate is the schedule's; some are Transformer Engine's.
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=model["optimizer"]["kwargs"]["lr"])
        scheduler = _torch_scheduler(optimizer, model.get("scheduler"))
        rates = []
        for _ in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()  # once a train() call: dtensor_policy_worker_v2.py
        return rates

    def _megatron_rates(self, section: Mapping[str, Any], steps: int) -> list[float] | None:
        kind = _megatron_scheduler()
        if kind is None:
            return None
        optimizer, schedule = section["optimizer"], section["scheduler"]
        group: dict[str, Any] = {"lr": 0.0, "max_lr": optimizer["lr"], "min_lr": optimizer["min_lr"]}
        scheduler = kind(
            MagicMock(param_groups=[group]),
            init_lr=schedule["lr_warmup_init"],
            max_lr=optimizer["lr"],
            min_lr=optimizer["min_lr"],
            lr_warmup_steps=schedule["lr_warmup_iters"],  # in samples there, and each train() call adds one batch of them
            lr_decay_steps=schedule.get("lr_decay_iters") or 10**9,
            lr_decay_style=schedule["lr_decay_style"],
            start_wd=schedule["start_weight_decay"],
            end_wd=schedule["end_weight_decay"],
            wd_incr_steps=steps,
            wd_incr_style=schedule["weight_decay_incr_style"],
        )
        rates = []
        for _ in range(steps):
            rates.append(float(scheduler.get_lr(group)))
            scheduler.step(increment=1)
        return rates


def _megatron_scheduler() -> Any:
    """Return Megatron Core's class from its file alone, since its packages are stand-ins here; None if it is not installed."""
    try:
        file = distribution("megatron-core").locate_file("megatron/core/optimizer_param_scheduler.py")
    except PackageNotFoundError:
        return None
    spec = spec_from_file_location("optimizer_param_scheduler", str(file))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OptimizerParamScheduler


def _torch_scheduler(optimizer: torch.optim.Optimizer, config: Any) -> Any:
    """As ``nemo_rl/models/automodel/setup.py`` makes it."""
    if config is None:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    if isinstance(config, Mapping):
        return _import(config["name"])(optimizer, **config["kwargs"])
    stages = [_import(stage["name"])(optimizer, **stage["kwargs"]) for stage in config if "name" in stage]
    milestones = next(stage["milestones"] for stage in config if "milestones" in stage)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, stages, milestones)


def _import(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)

"""Sections ``optimizer``, ``scheduler`` and ``ema`` of a trained model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_serializer, model_validator

from strop.base_config import BaseConfig
from strop.problems import Problem

KNOWN_OPTIMIZERS = {  # the arguments of optimizers that can be checked without importing them
    "torch.optim.AdamW": frozenset(
        {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "fused", "differentiable"}
    )
}
KNOWN_SCHEDULERS = {  # the arguments of torch's schedulers, each with its range, that can be checked without importing them
    "torch.optim.lr_scheduler.LinearLR": {"start_factor": (1e-12, 1.0), "end_factor": (0.0, 1.0), "total_iters": (1, 10**12)},
    "torch.optim.lr_scheduler.ConstantLR": {"factor": (0.0, 1.0), "total_iters": (1, 10**12)},
    "torch.optim.lr_scheduler.CosineAnnealingLR": {"T_max": (1, 10**12), "eta_min": (0.0, 1.0)},
}
RATE_ELSEWHERE = ("learning_rate", "max_lr", "lr_rate", "base_lr")  # names of lr in other libraries
LARGEST_RATE = 1000.0  # for any optimizer; weights overflow long before this
LARGEST_ADAM_RATE = 1.0  # a step of Adam moves each weight by about lr, for any gradient


class OptimizerGroupConfig(BaseConfig):
    """Parameters with their own learning rate or weight decay."""

    identity_keys: ClassVar[tuple[str, ...]] = ("match",)

    match: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        ..., description="Patterns of parameter names, as in no_decay."
    )
    lr: float | None = Field(None, ge=0, description="Learning rate, scaled by the scheduler; null is that of kwargs.")
    weight_decay: float | None = Field(None, ge=0, description="Weight decay; null is that of kwargs.")

    @model_validator(mode="after")
    def _check_not_empty(self) -> OptimizerGroupConfig:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(
                "the group sets neither lr nor weight_decay, so it has no effect; set one of them, or remove the group"
            )
        return self


class OptimizerConfig(BaseConfig):
    """The optimizer."""

    identity_keys: ClassVar[tuple[str, ...]] = ("name", "no_decay", "decay_vectors", "kwargs.amsgrad", "kwargs.centered")

    name: str = Field(
        "torch.optim.AdamW",
        min_length=1,
        description="Dotted name of an optimizer class of torch or an installed package, such as "
        "bitsandbytes.optim.AdamW8bit or torchao.optim.AdamW8bit.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
        description="Arguments; lr is required. Setting kwargs in a file replaces this default as a whole.",
    )
    no_decay: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="Name patterns of parameters without weight decay, such as [bias, norm, embed]. A pattern matches a part of the name "
        "or, with * ? or [, the whole name. A pattern without a match is an error.",
    )
    decay_vectors: bool = Field(True, description="Decay weights of one dimension too: biases and norms.")
    groups: Annotated[tuple[OptimizerGroupConfig, ...], Field(strict=False)] = Field(
        (),
        description="Entries {match: [pattern, ...], lr, weight_decay}. The first entry that matches a parameter applies; no_decay takes "
        "precedence.",
    )

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_numbers(f"{key}.kwargs")
        unknown = sorted(set(self.kwargs) - KNOWN_OPTIMIZERS.get(self.name, frozenset(self.kwargs)))
        for name in unknown:
            takes = f"{self.name} takes no argument {name}; it takes {', '.join(sorted(KNOWN_OPTIMIZERS[self.name]))}"
            near = ["lr"] if name in RATE_ELSEWHERE else difflib.get_close_matches(name, KNOWN_OPTIMIZERS[self.name], 1, 0.75)
            yield Problem(f"{key}.kwargs.{name}", takes, f"Did you mean {key}.kwargs.{near[0]}?" if near else "Remove it.")
        if "lr" not in self.kwargs and not unknown:
            yield Problem(
                f"{key}.kwargs",
                "it has no lr, and the optimizer's default is far too large or missing",
                f"Set {key}.kwargs.lr, for instance to 5e-6.",
            )

    def _check_numbers(self, key: str) -> Iterator[Problem]:
        rate = LARGEST_ADAM_RATE if "adam" in self.name.lower() else LARGEST_RATE
        for name, highest, usual in (("lr", rate, "5e-6"), ("weight_decay", LARGEST_RATE, "0.01"), ("eps", 1.0, "1e-8")):
            value = self.kwargs.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
                message = f"found {value!r:.80}; it must be a number from 0 to {highest:g}"
                yield Problem(f"{key}.{name}", message, _hint(value, usual))
        betas = self.kwargs.get("betas", [0.9, 0.999])
        if not isinstance(betas, list | tuple) or not all(_is_fraction(beta) for beta in betas):
            yield Problem(
                f"{key}.betas",
                f"found {betas!r:.80}; it must be a list of numbers from 0 to below 1",
                "For instance [0.9, 0.999].",
            )


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _hint(value: Any, usual: str) -> str:
    """Return a hint for a number that YAML 1.2 reads as a text, such as 5e-6 in quotes."""
    odd = sorted({character for character in value if ord(character) > 127}) if isinstance(value, str) else []
    if odd:
        return f"Write it in plain characters: it has {', '.join(f'{one} (U+{ord(one):04X})' for one in odd)}."
    try:
        float(value)
    except (TypeError, ValueError):
        return f"Set a number, such as {usual}."
    return "Write it without quotes." if isinstance(value, str) else f"Set a number, such as {usual}."


class ScheduleStageConfig(BaseConfig):
    """One learning-rate schedule."""

    name: str = Field(
        ...,
        min_length=1,
        description="constant, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, wsd (warm-up, stable, decay), or the "
        "dotted name of a torch scheduler class.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments. Every named schedule takes warmup_steps or warmup_ratio, warmup_init_ratio (of the rate "
        "at the first step), and total_steps (null is all of the run, or up to the next milestone); all but constant take min_ratio; "
        "cosine_with_restarts takes cycles, polynomial power, inverse_sqrt timescale (steps), wsd decay_steps or "
        "decay_ratio and decay (linear, cosine, sqrt, exponential).",
    )


class SchedulerConfig(BaseConfig):
    """A sequence of schedulers: stage i + 1 takes over at step milestones[i].

    Written as one ``{name, kwargs}``, or as a list of them that ends in ``{milestones: [...]}``.
    """

    stages: Annotated[tuple[ScheduleStageConfig, ...], Field(strict=False, min_length=1)]
    milestones: Annotated[tuple[int, ...], Field(strict=False)] = ()

    @model_validator(mode="before")
    @classmethod
    def _parse_stages(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "stages" not in values:
            return {"stages": [values], "milestones": []}
        if isinstance(values, Sequence) and not isinstance(values, str):
            stages = [value for value in values if not (isinstance(value, Mapping) and set(value) == {"milestones"})]
            milestones = [value["milestones"] for value in values if value not in stages]
            return {"stages": stages, "milestones": milestones[-1] if milestones else []}
        return values

    @model_validator(mode="after")
    def _check_milestones(self) -> SchedulerConfig:
        if len(self.milestones) != len(self.stages) - 1:
            raise ValueError(
                f"{len(self.stages)} schedulers need {len(self.stages) - 1} milestones (the steps at which the next one takes over), "
                f"found {len(self.milestones)}; end the list with {{milestones: [...]}}"
            )
        if any(later <= earlier for earlier, later in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ValueError(f"milestones {list(self.milestones)} must increase")
        return self

    @model_serializer
    def _serialize(self) -> Any:
        stages: list[Any] = [{"name": stage.name, "kwargs": stage.kwargs} for stage in self.stages]
        return stages[0] if not self.milestones else [*stages, {"milestones": list(self.milestones)}]


class EmaConfig(BaseConfig):
    """An exponential moving average of the trained weights, saved alongside them."""

    enabled: bool = Field(False, description="Keep an average in float32, and save it as a Hugging Face folder policy/ema.")
    decay: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="Weight of the old average in an optimizer step (fraction).",
    )
    start_step: int = Field(0, ge=0, description="Until this step the average equals the weights (optimizer steps).")

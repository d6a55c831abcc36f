"""Section ``lora_cfg`` of a trained model: low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from strop import packages
from strop.base_config import BaseConfig
from strop.packages import install_command
from strop.problems import Problem

Patterns = Annotated[tuple[str, ...], Field(strict=False)]


class LoraConfig(BaseConfig):
    """Low-rank adapters (LoRA) on the linear layers of a frozen model, saved in PEFT's format."""

    identity_keys: ClassVar[tuple[str, ...]] = (
        "enabled", "target_modules", "exclude_modules", "match_all_linear", "dim", "alpha", "use_rslora", "lora_A_init",
    )  # fmt: skip
    unrelated_keys: ClassVar[tuple[str, ...]] = ("use_triton",)

    enabled: bool = Field(False, description="Train only adapters. The reference policy is then the model with its adapters off.")
    target_modules: Patterns = Field(
        (),
        description="Name patterns of the layers that get adapters, such as [q_proj, v_proj] or ['*.mlp.*']. A pattern matches a suffix "
        "of a name after a dot or, with * ? or [, the whole name. A pattern without a match is an error.",
    )
    exclude_modules: Patterns = Field((), description="Name patterns of layers without adapters, matched in the same way.")
    match_all_linear: bool | None = Field(
        None,
        description="Put adapters on every linear layer except the output layer; null is true if target_modules is empty, and so is "
        "false with only exclude_modules.",
    )
    dim: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: int = Field(32, ge=1, description="Scale of an adapter: its output is multiplied by alpha / dim.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(dim) instead.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout probability in training; only for recorded data, where the policy does not sample (fraction).",
    )
    dropout_position: Literal["pre", "post"] = Field(
        "post", description="Drop an adapter's inputs (pre, as PEFT does) or outputs (post)."
    )
    lora_A_init: Literal["xavier", "uniform"] = Field(
        "xavier", description="Initialisation of A: xavier (normal) or uniform (Kaiming, as PEFT does). B starts at zero."
    )
    use_triton: bool = Field(True, description="Accepted for NeMo-RL recipes, without effect: there are no kernels to choose.")

    @model_validator(mode="after")
    def _check_target_modules(self) -> LoraConfig:
        if self.target_modules and self.match_all_linear:
            raise ValueError(
                f"target_modules is {', '.join(self.target_modules)}, but match_all_linear=true selects every linear layer; remove one of "
                "them"
            )
        if self.match_all_linear is False and not self.target_modules and not self.exclude_modules:
            raise ValueError(
                "match_all_linear=false without target_modules selects no layer; set target_modules, or match_all_linear=true"
            )
        return self

    def errors(self, key: str) -> Iterator[Problem]:
        if self.enabled and not packages.is_installed("peft"):
            yield Problem(
                f"{key}.enabled",
                "found true, but the package peft is not installed",
                f"Run {install_command('lora')}, or set {key}.enabled=false.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        if self.enabled and not self.use_triton:
            yield Problem(f"{key}.use_triton", "found false, which has no effect: adapters have no kernels to choose")

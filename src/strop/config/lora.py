"""Section ``lora_cfg`` of a trained model: low-rank adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from strop.config.model import Model

Patterns = Annotated[tuple[str, ...], Field(strict=False)]


class LoraConfig(Model):
    """Low-rank adapters (LoRA) on the linear layers of a frozen model, saved in PEFT's format."""

    enabled: bool = Field(
        False, description="Train adapters alone. The reference policy is then the model with its adapters off."
    )
    target_modules: Patterns = Field(
        (),
        description="Patterns of the names of layers that get adapters, such as [q_proj, v_proj] or ['*.mlp.*']: a name's end after a "
        "dot, or, with * ? or [, all of it. One that matches nothing is an error.",
    )
    exclude_modules: Patterns = Field((), description="Patterns of the names of layers that get none, matched alike.")
    match_all_linear: bool | None = Field(
        None,
        description="Adapters on every linear layer but the output layer; null is true where target_modules is empty.",
    )
    dim: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: int = Field(32, ge=1, description="What an adapter adds is scaled by alpha / dim.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(dim) instead.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of values dropped while gradients are taken; only where no policy samples (fraction)."
    )
    dropout_position: Literal["pre", "post"] = Field(
        "post", description="Drop from what an adapter reads (pre, as PEFT does) or from what it adds (post)."
    )
    lora_A_init: Literal["xavier", "uniform"] = Field(
        "xavier",
        description="First weights of the half that reads: xavier (normal) or uniform (Kaiming, as PEFT does); the other half is zero.",
    )
    use_triton: bool = Field(True, description="Taken for recipes that have it; there are no kernels to choose.")

    @model_validator(mode="after")
    def _layers_are_named_once(self) -> LoraConfig:
        if self.target_modules and self.match_all_linear:
            raise ValueError(
                f"target_modules names {', '.join(self.target_modules)}, and match_all_linear=true takes every linear layer; remove one of "
                "them"
            )
        if self.match_all_linear is False and not self.target_modules:
            raise ValueError(
                "match_all_linear=false and no target_modules leave no layer for an adapter; name some, or set it to true"
            )
        return self

    def options(self) -> dict[str, Any]:
        """As ``strop.models.lora.LoraOptions`` takes them."""
        left_out = {"enabled", "match_all_linear", "lora_A_init", "use_triton"}
        return {**self.model_dump(exclude=left_out), "initialiser": self.lora_A_init}

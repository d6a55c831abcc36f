"""Section ``policy.fp8``: training in FP8 with torchao, with the key names of NeMo Automodel and torchtitan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop import packages
from strop.base_config import BaseConfig
from strop.packages import install_command
from strop.problems import Problem

Names = Annotated[tuple[str, ...], Field(strict=False)]


class Float8Config(BaseConfig):
    """FP8 linear layers in the torch learner (torchao); weights, gradients and optimizer state keep their precision."""

    identity_keys: ClassVar[tuple[str, ...]] = ("enabled", "recipe_name", "filter_fqns")

    enabled: bool = Field(
        False,
        description="Compute the products of linear layers in FP8, in both passes. Needs a GPU with FP8, or emulate, and the extra fp8.",
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        "rowwise_with_gw_hp",
        description="Granularity of scales: per tensor, or per row; with_gw_hp computes weight gradients in high precision, and its "
        "scales do not depend on the rest of a micro-batch.",
    )
    filter_fqns: Names = Field(
        ("lm_head",), description="Layers that stay in high precision: those whose name contains one of these texts."
    )
    emulate: bool = Field(False, description="Round to FP8 and multiply in high precision, on any device: slow, for tests.")

    def float8_errors(self, key: str, device: str) -> Iterator[Problem]:
        """Yield the errors of this section, whose dotted key is ``key``, on ``device`` (auto: not known yet)."""
        if not self.enabled:
            return
        if not packages.is_installed("torchao"):
            yield Problem(
                f"{key}.enabled",
                "found true, but the package torchao is not installed",
                f"Run {install_command('fp8')}, or set it to false.",
            )
        if device == "cpu" and not self.emulate:
            yield Problem(
                f"{key}.enabled",
                "found true, but a CPU has no products in FP8",
                f"Set {key}.emulate=true to round as FP8 does, slowly, or {key}.enabled=false.",
            )

    def float8_warnings(self, key: str) -> Iterator[Problem]:
        if not self.enabled:
            return
        if self.recipe_name == "rowwise_with_gw_hp":
            yield Problem(
                key,
                "gradients are rounded to FP8: if a group is cut between its rollouts, its prompt's gradient is rounded in each part, "
                "and so depends on the cut by FP8's rounding",
            )
        else:
            yield Problem(
                f"{key}.recipe_name",
                f"found {self.recipe_name}, whose scales are computed per micro-batch: the gradient depends on how a batch is cut, and "
                "runs with other token budgets or ranks differ by FP8's rounding",
                f"{key}.recipe_name=rowwise_with_gw_hp has scales of tokens.",
            )

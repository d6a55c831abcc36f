"""Optimizers of other packages that torch has too."""

from __future__ import annotations

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Rule

# Of Transformer Engine's optimizer: in which type it keeps what, which torch's keeps as the weights.
STORAGE = (
    "master_weights", "master_weight_dtype", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype", "set_grad_none",
    "capturable", "use_decoupled_grad",
)  # fmt: skip


def translate_fused_adam(recipe: Recipe) -> None:
    """Take torch's AdamW, the same formula, for Transformer Engine's fused one."""
    for key in list(recipe.find("*.optimizer.name")):
        if not str(recipe.value(key)).startswith("transformer_engine.") or not str(recipe.value(key)).endswith(".FusedAdam"):
            continue
        options = f"{key.removesuffix('.name')}.kwargs"
        decoupled = recipe.value(f"{options}.adam_w_mode", True)
        name = "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
        recipe.set(key, name, because=key)
        for option in (*STORAGE, "adam_w_mode"):
            recipe.drop(f"{options}.{option}")
        if recipe.value(f"{options}.weight_decay") is None:
            recipe.set(f"{options}.weight_decay", 0.0, because=key)  # its default
        recipe.note(key, Effect.CHANGED, f"{name} here, the same formula, with moments in the type of the trained weights")


OPTIMIZER_RULES: tuple[Rule, ...] = (translate_fused_adam,)

"""Megatron Core's learning-rate schedules as those of ``policy.scheduler``, with the same rate at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
WSD_DECAYS = {"linear": "linear", "cosine": "cosine", "exponential": "exponential", "minus_sqrt": "sqrt"}


def make_schedule_section(options: Mapping[str, Any], rate: float, lowest: float) -> dict[str, Any] | None:
    """Return the section ``scheduler`` for options of ``megatron_cfg.scheduler``; None for a constant rate.

    ``rate`` and ``lowest`` are the optimizer's ``lr`` and ``min_lr``. NeMo-RL's workers advance the schedule once a call of ``train``:
    its iterations are passes over a batch. Raises ValueError for what no schedule here says.
    """
    style = options.get("lr_decay_style", "linear")
    if style not in SHAPES:
        raise ValueError(f"found {style!r}, which is none of {', '.join(SHAPES)}")
    kwargs = _warmup(options, rate)
    if style == "constant":
        return {"name": "constant", "kwargs": kwargs} if kwargs else None
    kwargs["min_ratio"] = lowest / rate if rate else 0.0
    if style == "inverse-square-root":
        start = {} if "warmup_init_ratio" in kwargs else {"warmup_steps": 1, "warmup_init_ratio": 1.0}  # as from its first step
        return {"name": "inverse_sqrt", "kwargs": {**kwargs, **start}}
    if options.get("lr_decay_iters") is not None:
        kwargs["total_steps"] = options["lr_decay_iters"]
    if style == "WSD":
        if options.get("lr_wsd_decay_iters") is None:
            raise ValueError("found 'WSD', but lr_wsd_decay_iters is not set")
        decay = WSD_DECAYS[options.get("lr_wsd_decay_style", "exponential")]
        kwargs |= {"decay": decay, "decay_steps": options["lr_wsd_decay_iters"]}
    return {"name": SHAPES[style], "kwargs": kwargs}


def _warmup(options: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Return the arguments of the warm-up, which begins at ``lr_warmup_init``; none without a warm-up."""
    if options.get("lr_warmup_fraction"):
        length: dict[str, Any] = {"warmup_ratio": options["lr_warmup_fraction"]}
    elif options.get("lr_warmup_iters"):
        length = {"warmup_steps": options["lr_warmup_iters"]}
    else:
        return {}
    return {**length, "warmup_init_ratio": (options.get("lr_warmup_init") or 0.0) / rate if rate else 0.0}

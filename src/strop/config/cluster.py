"""Section ``cluster``: the machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.config.model import Model


class ClusterConfig(Model):
    """The machines."""

    gpus_per_node: int = Field(1, ge=0, description="GPUs of each node that may be used (GPUs).")
    num_nodes: int = Field(1, ge=1, description="Nodes (nodes).")
    backend: Literal["auto", "local", "ray"] = Field(
        "auto", description="local is this process; ray is Ray actors; auto is local where that suffices."
    )

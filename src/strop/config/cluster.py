"""Section ``cluster``: the machines, and what each role has of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.model import Model, subsection

Strings = Annotated[tuple[str, ...], Field(strict=False)]


class RoleConfig(Model):
    """The processes of one role."""

    num_cpus: float = Field(0.0, ge=0, description="CPUs that Ray reserves for each of its processes; 0 reserves none (CPUs).")
    num_gpus: float | None = Field(
        None,
        gt=0,
        description="GPUs beside those of the run that Ray finds for each process of the roles teacher and environment; null is 1 for a "
        "teacher and none for an environment, whose processes then see no GPU (GPUs). A part of one, such as 0.5, is shared.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="The cluster's own kinds of resources, such as {sandbox: 1}, for each of its processes."
    )
    env_vars: dict[str, str] = Field(default_factory=dict, description="Environment variables of its processes.")
    pip: Strings = Field((), description="Packages that its processes have over those of the node; Ray installs them.")
    python: str | None = Field(None, description="An interpreter of its own, with Strop installed in it; null is the node's.")


class RolesConfig(Model):
    """What each role has: the learner's ranks, the engines, the hosts of environments and of teachers."""

    learner: RoleConfig = subsection(RoleConfig)
    generator: RoleConfig = subsection(RoleConfig)
    environment: RoleConfig = subsection(RoleConfig)
    teacher: RoleConfig = subsection(RoleConfig)


class ClusterConfig(Model):
    """The machines."""

    gpus_per_node: int = Field(
        1, ge=0, description="GPUs of each node that may be used; without GPUs, as many processes stand for them (GPUs)."
    )
    num_nodes: int = Field(1, ge=1, description="Nodes (nodes).")
    backend: Literal["auto", "local", "ray"] = Field(
        "auto", description="local is this process; ray is Ray actors; auto is local where there is one device to train on."
    )
    address: str | None = Field(
        None,
        description="The running Ray cluster to join, host:port; null is the one that RAY_ADDRESS or `ray start` on this machine says, "
        "or else a new one on this machine, which ends with the run; local is always a new one.",
    )
    segment_size: int | None = Field(
        None,
        ge=1,
        description="Nodes in one NVLink domain that come together in the order of ranks; null does not ask (nodes). Nodes say theirs by "
        "the Ray label strop.nvlink-domain.",
    )
    wait_seconds: float = Field(120.0, gt=0, description="How long nodes that are still to join are waited for (seconds).")
    environment_hosts: int = Field(
        0,
        ge=0,
        description="Processes that environments run in, for each alias of env; 0 runs them in the driver's (processes). Only with Ray.",
    )
    max_restarts: int = Field(
        3, ge=0, description="How often in a row, without a step between them, a learner that lost a rank starts anew (restarts)."
    )
    shrink_on_lost_node: bool = Field(
        False, description="Go on with the engines that are left when those of a lost node cannot be started anew."
    )
    roles: RolesConfig = subsection(RolesConfig)

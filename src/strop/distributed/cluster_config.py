"""Section ``cluster``: the machines and the resources of each role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, subsection
from strop.problems import Problem

Strings = Annotated[tuple[str, ...], Field(strict=False)]


class RoleConfig(BaseConfig):
    """The processes of one role."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    num_cpus: float = Field(0.0, ge=0, description="CPUs reserved by Ray for each process; 0 reserves none (CPUs).")
    num_gpus: float | None = Field(
        None,
        gt=0,
        description="GPUs of each process of an environment or of a scoring model, in addition to the run's; a fraction such as 0.5 shares "
        "one. null is none for an environment and 1 for a scoring model (GPUs).",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources of each process, such as {sandbox: 1}."
    )
    env_vars: dict[str, str] = Field(default_factory=dict, description="Environment variables of the processes.")
    pip: Strings = Field((), description="Packages that Ray installs for the processes, on top of the node's.")
    python: str | None = Field(None, description="Interpreter of the processes, with Strop installed in it; null is the node's.")


class RolesConfig(BaseConfig):
    """Resources of the learner's ranks, the engines, and the environment processes."""

    learner: RoleConfig = subsection(RoleConfig)
    generator: RoleConfig = subsection(RoleConfig)
    environment: RoleConfig = subsection(RoleConfig)


class ClusterConfig(BaseConfig):
    """The machines and how a run uses them."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    gpus_per_node: int = Field(
        1,
        ge=0,
        le=1024,
        description="GPUs to use on each node; without GPUs, the same number of processes (GPUs).",
    )
    num_nodes: int = Field(1, ge=1, le=10_000, description="Number of nodes (nodes).")
    backend: Literal["auto", "local", "ray"] = Field(
        "auto", description="local is this process; ray is Ray actors; auto is local if one device trains."
    )
    address: str | None = Field(
        None,
        description="Ray cluster to join, host:port. null joins RAY_ADDRESS or the cluster of `ray start` on this machine, "
        "or else starts one that ends with the run; local always starts one.",
    )
    segment_size: int | None = Field(
        None,
        ge=1,
        description="Nodes of one NVLink domain that get consecutive ranks; null ignores domains (nodes). The Ray label "
        "strop.nvlink-domain names a node's domain.",
    )
    wait_seconds: float = Field(120.0, gt=0, description="How long to wait for nodes to join (seconds).")
    environment_hosts: int = Field(
        0,
        ge=0,
        description="Processes for each environment of env; 0 runs environments in the driver's process (processes). Only "
        "with Ray.",
    )
    max_restarts: int = Field(
        3, ge=0, description="Restarts in a row, without a step between them, of a learner that lost a rank (restarts)."
    )
    shrink_on_lost_node: bool = Field(
        False, description="Continue with the remaining engines when those of a lost node cannot be restarted."
    )
    roles: RolesConfig = subsection(RolesConfig)

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_backend(key)
        yield from self._check_training_device(key)
        yield from self._check_role_gpus(key)
        yield from self._check_segments(key)

    def _check_backend(self, key: str) -> Iterator[Problem]:
        if self.backend == "local" and self.num_nodes > 1:
            yield Problem(
                f"{key}.backend",
                f"found local with cluster.num_nodes = {self.num_nodes}, but one process runs on one node",
                "Set it to auto or ray.",
            )

    def _check_training_device(self, key: str) -> Iterator[Problem]:
        if self.gpus_per_node < 1:
            yield Problem(
                f"{key}.gpus_per_node",
                "found 0, which leaves no device to train",
                "Set it to 1 or more; policy.device=cpu needs no GPU.",
            )

    def _check_role_gpus(self, key: str) -> Iterator[Problem]:
        for name, role in (("learner", self.roles.learner), ("generator", self.roles.generator)):
            if role.num_gpus is not None:
                yield Problem(
                    f"{key}.roles.{name}.num_gpus",
                    f"found {role.num_gpus:g}, but its processes use the GPUs of the run (cluster.gpus_per_node)",
                    "Remove it.",
                )

    def _check_segments(self, key: str) -> Iterator[Problem]:
        if self.segment_size is not None and self.num_nodes % self.segment_size:
            yield Problem(
                f"{key}.segment_size",
                f"found {self.segment_size}, which does not divide cluster.num_nodes = {self.num_nodes}; all segments have the same size",
                "Set it to a divisor of cluster.num_nodes, or to null.",
            )

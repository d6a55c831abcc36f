"""Megatron Core, imported by the server whose forks are ranks (``support.forks``): it takes longer than most of their work."""

from __future__ import annotations

from importlib.util import find_spec
from shutil import which

from strop.extensions.megatron.cpu_shim import prepare_megatron

if (
    find_spec("megatron") is not None and which("nvidia-smi") is None
):  # a fork cannot begin to use a GPU that its server has asked for
    prepare_megatron("cpu")
    import strop.extensions.megatron.megatron_learner
    import strop.extensions.megatron.models.build_stages
    import strop.extensions.megatron.weight_map  # noqa: F401

"""Megatron Core reads what Strop saves, and Strop what Megatron Core saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.megatron_families import FAMILIES
from support.ranks import run_on_ranks

pytest.importorskip("megatron.core")

Layouts = list[tuple[str, dict[str, Any]]]
LAYOUTS: Layouts = [("qwen2", {"tp": 2}), ("qwen3_moe", {"ep": 2, "pp": 1, "distributed": True})]
OF_FAMILIES: Layouts = [
    (name, sizes) for name in FAMILIES for sizes in ({"tp": 2, "etp": 2} if "moe" in name else {"tp": 2}, {"pp": 2, "vp": 2})
]


def exchange(rank: int, root: str, layouts: Layouts) -> None:
    from strop.extensions.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    from strop.extensions.megatron.checkpoint.hugging_face import read_hugging_face_weights
    from support.megatron_checkpoints import train_stages

    for number, (family, sizes) in enumerate(layouts):
        folder = Path(root) / str(number)
        run = train_stages(family, steps=1, **sizes)
        run.snapshot().save(folder)
        wanted = run.weights()
        run.step(2)
        load_with_megatron(run.stages, folder / "weights" / "iter_0000000")
        assert all(bool((tensor == wanted[name]).all()) for name, tensor in run.weights().items()), family
        save_with_megatron(run.stages, folder / "theirs" / "iter_0000000", rank)
        config = run.hf_config.__class__.from_pretrained(folder / "weights")
        for source in ("weights", "theirs"):
            found = read_hugging_face_weights(folder / source / "iter_0000000", config)
            assert found.keys() <= wanted.keys()
            assert all(bool((tensor == wanted[name]).all()) for name, tensor in found.items()), (family, source)


def load_with_megatron(stages: list[Any], folder: Path) -> None:
    """Load weights as Megatron-LM does."""
    from megatron.core import dist_checkpointing

    state = {str(index): standard_names(stage) for index, stage in enumerate(stages)}
    for stage_state in state.values():
        for name in [name for name in stage_state if name.endswith("_extra_state")]:
            del stage_state[name]  # of Transformer Engine, which is not there
    loaded = dist_checkpointing.load(state, str(folder))
    for index, stage in enumerate(stages):
        missing, unexpected = stage.load_state_dict(loaded[str(index)], strict=False)
        assert not unexpected and all(name.endswith("_extra_state") for name in missing)


def save_with_megatron(stages: list[Any], folder: Path, rank: int) -> None:
    """Save weights as Megatron-LM does."""
    import multiprocessing

    import megatron.core.dist_checkpointing.strategies.filesystem_async as files
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    files._results_queue = multiprocessing.get_context("fork").Manager().Queue()  # its own is spawned, and needs a main module
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({str(index): standard_names(stage) for index, stage in enumerate(stages)}, str(folder))


def standard_names(stage: Any) -> dict[str, Any]:
    """Return a stage's tensors under the names that Megatron Core's own specs of layers give them."""
    from strop.extensions.megatron.checkpoint.stage_shards import saved_key

    state: dict[str, Any] = stage.sharded_state_dict()
    keys = {each.key for each in state.values()}
    for each in state.values():
        each.key = saved_key(each.key, keys)
    return state


@pytest.mark.exhaustive
def test_folders_are_megatron_core_s_own(tmp_path: Path) -> None:
    run_on_ranks(2, exchange, str(tmp_path), LAYOUTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(3))
def test_folders_of_every_family_are_megatron_core_s_own(tmp_path: Path, part: int) -> None:
    run_on_ranks(2, exchange, str(tmp_path), OF_FAMILIES[part::3])

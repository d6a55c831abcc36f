"""The table of model families in docs/training.md, decided by the code from tiny configurations.

python tests/support/family_table.py                 prints it
python tests/support/family_table.py --write         writes it into the page, between its two comments
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from strop.extensions.megatron.families.find_family import find_family
from strop.generation.torch.model_runner import infer_cache_shape
from strop.generation.torch.torch_engine import find_cache_obstacle
from strop.learner.parallel.derived_plan import find_mixers
from strop.learner.parallel.expert_parallel import check_experts, find_experts
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.pipeline.pipeline_stages import PipelineStages
from strop.learner.parallel.tensor_plan import find_regions
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers.indexers import IndexRows, PathBlocks
from strop.models.mixers.mixer_interface import is_mixer
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows
from strop.models.network import Network
from strop.models.vision.vision_families import known_families
from support.every_family import FAMILIES, build, make_network

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
BEGIN, END = "<!-- families: python tests/support/family_table.py --write -->", "<!-- end of families -->"
HEADER = (
    "`model_type`",
    "mixer",
    "rows",
    "tensor ranks",
    "context ranks",
    "expert ranks",
    "stages",
    "Megatron",
    "engine",
    "images",
)
MIXERS = {  # what a mixer calls, in the order of asking
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "mamba2_chunk_scan": "Mamba 2",
    "mamba_selective_scan": "Mamba",
    "causal_conv1d_fn": "short convolution",
}


@dataclass(frozen=True)
class FamilyRow:
    """The cells of a family."""

    mixer: str
    rows: str  # shared: packed, prompts read once
    tensor: str
    context: str
    expert: str
    stages: str
    megatron: str
    engine: str
    images: str


class _Recorder:
    """A plan that records what layers ask of it."""

    def __init__(self) -> None:
        self.chooses = False  # for an indexer
        self.windows: set[int | None] = set()
        self.scans: list[Recurrence] = []
        self.channels: list[int] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.windows.add(spec.window)
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        self.channels.append(len(weight))
        return inputs

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        self.chooses = True
        return rows.choose_everything()

    def blocks(self, size: int) -> PathBlocks:
        self.chooses = True
        return TreePlan(*(torch.tensor([each]) for each in (0, 2, -1)), torch.device("cpu")).blocks(size)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        self.scans.append(recurrence)
        return recurrence([each[None] for each in rows])[0][0]


def find_row(name: str) -> tuple[str, FamilyRow]:
    """Return the ``model_type`` and the cells of a family of ``FAMILIES``."""
    network = make_network(build(name))
    mixers = [module for module in network.model.modules() if is_mixer(module)]
    recorder = _record(network) if network.packed else _Recorder()
    kind = network.model.config.model_type
    return kind, FamilyRow(
        mixer=_name_mixer(mixers, recorder, network),
        rows="shared" if network.packed else "padded",
        tensor=_cell(network, lambda: _divide_tensors(network)),
        context=_cell(network, lambda: _divide_context(recorder)),
        expert=_cell(network, lambda: _divide_experts(network)),
        stages=_cell(network, lambda: _cut(network)),
        megatron=_accepts(lambda: find_family(network.model.config)),
        engine=_find_engine(network),
        images="yes" if kind in _kinds_with_images() else "",
    )


def _record(network: Network) -> _Recorder:
    recorder = _Recorder()
    network.use_plan_attention()
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        network.decoder(input_ids=tokens, position_ids=torch.arange(2)[None], plan=recorder, use_cache=False)
    network.use_learner_attention()
    return recorder


def _name_mixer(mixers: Sequence[Any], recorder: _Recorder, network: Network) -> str:
    called = {name for module in mixers for name in inspect.unwrap(type(module).forward).__code__.co_names}
    named = next((text for name, text in MIXERS.items() if name in called), None)
    if named is not None:
        return named
    if recorder.chooses:
        return "sparse attention"
    if not network.packed:
        return str(network.fallback).partition(", a ")[2].partition(",")[0] or "attention"  # the module that is in the way
    return "attention, windows" if recorder.windows - {None} else "attention"


def _cell(network: Network, decide: Callable[[], str]) -> str:
    return decide() if network.packed else "no"


def _accepts(check: Callable[[], object]) -> str:
    try:
        check()
    except ValueError:
        return "no"
    return "yes"


def _divide_tensors(network: Network) -> str:
    try:
        find_regions(network.model, ParallelDims(tensor=2))
        check_experts(network.model, ParallelDims(tensor=2))
    except ValueError as error:
        return "no plan" if "no tensor-parallel plan" in str(error) or "shards no linear layer" in str(error) else "no"
    return "mixers whole" if None in find_mixers(network.model).values() else "yes"


def _divide_context(recorder: _Recorder) -> str:
    divided = all(not each.constants and each.state_shape[0] % 2 == 0 for each in recorder.scans)
    return "yes" if divided and all(each % 2 == 0 for each in recorder.channels) else "gathered"


def _divide_experts(network: Network) -> str:
    return _accepts(lambda: check_experts(network.model, ParallelDims(shard=2, expert=2))) if find_experts(network.model) else ""


def _cut(network: Network) -> str:
    return _accepts(lambda: PipelineStages(network, ParallelDims(pipeline=2)))


def _find_engine(network: Network) -> str:
    if find_cache_obstacle(network) is not None:
        return "recomputes"
    shape = infer_cache_shape(network)
    return "states" if shape.states else "cache"


@cache
def _kinds_with_images() -> frozenset[str]:
    """The types of the language models in vision-language models of known families."""
    return frozenset(str(AutoConfig.for_model(kind).get_text_config().model_type) for kind in known_families())


def make_table(names: Iterable[str] = FAMILIES) -> str:
    """Return the table of these families in Markdown; those with equal cells share a row."""
    rows: dict[FamilyRow, list[str]] = {}
    for name in names:
        kind, row = find_row(name)
        rows.setdefault(row, []).append(kind)
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row, kinds in sorted(rows.items(), key=lambda each: (each[0].rows != "shared", each[0].mixer, each[1])):
        cells = (", ".join(f"`{kind}`" for kind in dict.fromkeys(kinds)), *astuple(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_rows(page: Path = PAGE) -> dict[str, set[tuple[str, ...]]]:
    """Return the cells that the page has for each ``model_type``."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for line in page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]:
        kinds, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for kind in kinds.split(", "):
            found.setdefault(kind.strip("`"), set()).add(tuple(cells))
    return found


def main() -> None:
    table = make_table()
    if "--write" not in sys.argv:
        print(table)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()

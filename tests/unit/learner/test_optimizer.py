"""Optimizers and schedules by name are torch's own, and a mistake in either names its key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strop.learner.torch.optimizer import (
    load_optimizer,
    make_optimizer,
    make_parameter_groups,
    make_scheduler,
    matches_any,
)
from strop.learner.torch.optimizer_config import OptimizerConfig, OptimizerGroupConfig
from support.learners import make_named_optimizer, make_scheduler_config

NAMES = (
    "embed_tokens.weight",
    "layers.0.proj.weight",
    "layers.0.proj.bias",
    "layers.0.norm.weight",
    "layers.1.proj.weight",
    "head.weight",
)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (5,))]


def named(values: list[nn.Parameter] | None = None) -> list[tuple[str, nn.Parameter]]:
    return list(zip(("weight", "bias"), parameters() if values is None else values, strict=True))


def network() -> list[tuple[str, nn.Parameter]]:
    """Parameters called as those of a language model are, each all ones."""
    return [(name, nn.Parameter(torch.ones(2))) for name in NAMES]


def members(groups: list[dict[str, Any]]) -> list[tuple[set[str], dict[str, Any]]]:
    """(names, options) of each group."""
    return [(set(group["param_names"]), {k: v for k, v in group.items() if "param" not in k}) for group in groups]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("torch.optim.AdamW", {"lr": 1e-2, "betas": [0.8, 0.99], "weight_decay": 0.1}),
        ("torch.optim.SGD", {"lr": 1e-2, "momentum": 0.9}),
        ("torch.optim.Adafactor", {"lr": 1e-2}),
        ("torch.optim.RMSprop", {"lr": 1e-2}),
        ("torch.optim.AdamW", {"lr": 1e-2, "foreach": True}),
    ],
)
def test_an_optimizer_by_name_takes_the_same_steps_as_torchs_own(name: str, kwargs: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    factory: Any = getattr(torch.optim, name.rsplit(".", 1)[1])
    made, own = make_named_optimizer(name, named(ours), kwargs), factory(theirs, **kwargs)
    assert type(made) is factory
    for step in range(3):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.full_like(left, 0.1 * (step + 1))
            right.grad = left.grad.clone()
        made.step()
        own.step()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right, atol=1e-6)


def test_the_fused_form_is_used_unless_the_configuration_chooses() -> None:
    assert make_named_optimizer("torch.optim.AdamW", named(), {"lr": 1e-3}).defaults["fused"] is True
    assert make_named_optimizer("torch.optim.AdamW", named(), {"lr": 1e-3, "fused": False}).defaults["fused"] is False
    assert not make_named_optimizer("torch.optim.AdamW", named(), {"lr": 1e-3, "foreach": True}).defaults["fused"]


@pytest.mark.parametrize(
    "name", ["torch.optim.AdamWW", "torch.optimm.AdamW", "AdamW", "torch.optim.lr_scheduler.LinearLR", "torch.zeros"]
)
def test_a_name_that_is_no_optimizer_is_refused_with_its_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.optimizer\.name"):
        make_named_optimizer(name, named(), {"lr": 1e-3})


def test_an_argument_the_optimizer_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(ValueError, match=r"policy\.optimizer\.kwargs\.learning_rate: torch\.optim\.AdamW takes .*'lr'"):
        make_named_optimizer("torch.optim.AdamW", named(), {"learning_rate": 1e-3})


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def test_stages_with_milestones_give_the_rates_of_torchs_sequential_schedule() -> None:
    from torch.optim import lr_scheduler as torchs

    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 5}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}},
        {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 6}},
        {"milestones": [5, 9]},
    ]
    ours = torch.optim.SGD(parameters(), lr=0.3)
    theirs = torch.optim.SGD(parameters(), lr=0.3)
    stages = [
        torchs.LinearLR(theirs, start_factor=0.1, end_factor=1.0, total_iters=5),
        torchs.ConstantLR(theirs, factor=1.0, total_iters=100),
        torchs.CosineAnnealingLR(theirs, T_max=6),
    ]
    wanted = rates(torchs.SequentialLR(theirs, stages, milestones=[5, 9]), theirs, 15)
    found = rates(make_scheduler(make_scheduler_config(*schedule), ours), ours, 15)
    assert found == wanted
    assert found[:6] == pytest.approx([0.03, 0.084, 0.138, 0.192, 0.246, 0.3])


def test_one_stage_needs_no_milestone_and_none_leaves_the_rate_alone() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.3)
    assert make_scheduler(None, optimizer) is None
    stage = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    assert rates(make_scheduler(make_scheduler_config(stage), optimizer), optimizer, 3) == pytest.approx([0.3, 0.15, 0.075])


def test_stages_and_milestones_must_fit_together() -> None:
    stage = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {}}
    with pytest.raises(ValueError, match=r"2 schedulers need 1 milestones .* found 0"):
        make_scheduler(make_scheduler_config(stage, stage), torch.optim.SGD(parameters(), lr=0.3))


@pytest.mark.parametrize("name", ["torch.optim.lr_scheduler.LinearRL", "torch.optim.SGD", "LinearLR"])
def test_a_name_that_is_no_schedule_is_refused_with_its_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.scheduler\.name"):
        make_scheduler(make_scheduler_config({"name": name, "kwargs": {}}), torch.optim.SGD(parameters(), lr=0.3))


def test_an_argument_the_schedule_does_not_take_is_refused_with_its_key() -> None:
    stage = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_facto": 0.1}}
    with pytest.raises(ValueError, match=r"policy\.scheduler.*start_facto"):
        make_scheduler(make_scheduler_config(stage), torch.optim.SGD(parameters(), lr=0.3))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("bias", {2}),
        ("norm", {3}),
        ("embed", {0}),
        ("layers.0", {1, 2, 3}),
        ("layers.*.proj.weight", {1, 4}),
        ("layers.[01].proj.*", {1, 2, 4}),
        ("*.weight", {0, 1, 3, 4, 5}),
        ("*.proj", set()),
        ("Bias", set()),
    ],
)
def test_a_pattern_is_a_part_of_the_name_or_a_shell_pattern_of_all_of_it(pattern: str, found: set[int]) -> None:
    assert {place for place, name in enumerate(NAMES) if matches_any(name, [pattern])} == found


def test_a_parameter_is_of_the_first_group_that_matches_and_no_decay_goes_before_any() -> None:
    groups = [
        OptimizerGroupConfig(match=("layers.0",), lr=0.01, weight_decay=0.2),
        OptimizerGroupConfig(match=("layers.*", "head"), lr=0.001),
    ]
    found = members(make_parameter_groups(network(), groups, ["bias", "embed"]))
    assert found == [
        ({"embed_tokens.weight"}, {"weight_decay": 0.0}),
        ({"layers.0.proj.weight", "layers.0.norm.weight"}, {"lr": 0.01, "weight_decay": 0.2}),
        ({"layers.0.proj.bias"}, {"lr": 0.01, "weight_decay": 0.0}),
        ({"layers.1.proj.weight", "head.weight"}, {"lr": 0.001}),
    ]


def test_the_rate_of_a_group_is_the_one_its_parameters_move_with() -> None:
    ours = network()
    groups = [OptimizerGroupConfig(match=("head",), lr=0.5), OptimizerGroupConfig(match=("embed",), lr=0.0)]
    optimizer = make_named_optimizer("torch.optim.SGD", ours, {"lr": 0.1}, groups=groups)
    assert optimizer.param_groups[0]["lr"] == 0.1, "the first group, whose rate is logged, is the one without options of its own"
    for _, parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = {name: parameter[0].item() for name, parameter in ours}
    assert values == pytest.approx({**dict.fromkeys(NAMES, 0.9), "head.weight": 0.5, "embed_tokens.weight": 1.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"no_decay": ["bias", "layernorm"]},
            r"policy\.optimizer\.no_decay: 'layernorm' matches none of the 6 trained parameters",
        ),
        (
            {"groups": [OptimizerGroupConfig(match=("haed",), lr=1.0)]},
            r"policy\.optimizer\.groups\.0\.match: 'haed' matches none",
        ),
        (
            {"groups": [OptimizerGroupConfig(match=("layers",), lr=1.0), OptimizerGroupConfig(match=("proj",), lr=2.0)]},
            r"policy\.optimizer\.groups\.1: earlier groups contain every parameter",
        ),
    ],
)
def test_a_pattern_or_a_group_that_changes_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_named_optimizer("torch.optim.AdamW", network(), {"lr": 0.1}, **options)


def test_a_group_option_that_the_optimizer_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy\.optimizer\.groups\.weight_decay: torch\.optim\.Rprop takes .*'lr'"):
        make_named_optimizer("torch.optim.Rprop", network(), {"lr": 0.1}, no_decay=["bias"])


GROUPED: dict[str, Any] = {"groups": [OptimizerGroupConfig(match=("head",), lr=0.01)], "no_decay": ["bias", "norm"]}


def steps(ours: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Optimizer steps with gradients that follow from the step and the parameter's place."""
    for step in range(first, last):
        for place, (_, parameter) in enumerate(ours):
            generator = torch.Generator().manual_seed(1000 * step + place)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"saved with groups of \[3, 2, 1\] parameters, and this run has groups of \[6\]; set optimizer\.no_decay"),
        (
            {**GROUPED, "no_decay": ["bias", "embed"]},
            r"groups of \[3, 2, 1\] parameters, and this run has groups of \[3, 2, 1\] with other names",
        ),
    ],
)
def test_a_state_of_other_groups_is_refused_though_their_sizes_fit(options: dict[str, Any], message: str) -> None:
    saved = make_named_optimizer("torch.optim.AdamW", network(), {"lr": 0.1}, **GROUPED)
    with pytest.raises(ValueError, match=message):
        load_optimizer(make_named_optimizer("torch.optim.AdamW", network(), {"lr": 0.1}, **options), saved.state_dict())


def test_a_state_without_names_loads_by_its_sizes() -> None:
    """As earlier versions saved it."""
    ours = network()
    saved = torch.optim.AdamW([parameter for _, parameter in ours], lr=0.1)
    steps(ours, saved, 0, 2)
    made = make_named_optimizer("torch.optim.AdamW", network(), {"lr": 0.1})
    load_optimizer(made, saved.state_dict())
    assert all(float(state["step"]) == 2 for state in made.state.values()) and len(made.state) == len(NAMES)


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_a_package_that_is_missing_is_named_with_how_to_install_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def missing(name: str, *_: Any) -> None:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [type("Finder", (), {"find_spec": staticmethod(missing)}), *sys.meta_path])
    with pytest.raises(ValueError, match=rf"{package}\.optim\.AdamW8bit needs the package {package}.*pip install {package}"):
        make_named_optimizer(f"{package}.optim.AdamW8bit", network(), {"lr": 0.1})


@pytest.mark.parametrize("package", ["bitsandbytes", pytest.param("torchao", marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_an_8_bit_optimizer_trains_like_adamw_and_continues_bit_for_bit(package: str, tmp_path: Any) -> None:
    """128 x 64 weights: large enough for 8-bit moments in both. torchao compiles its step, which takes a while.

    After 6 steps of at most 0.01 the weights differ from AdamW's by less than a step (measured: 0.0047 and 0.0015).
    """
    pytest.importorskip(package)

    def fresh() -> list[tuple[str, nn.Parameter]]:
        generator = torch.Generator().manual_seed(0)
        return [("weight", nn.Parameter(torch.randn(128, 64, generator=generator))), ("bias", nn.Parameter(torch.zeros(64)))]

    def made(name: str, ours: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return make_named_optimizer(name, ours, {"lr": 0.01, "weight_decay": 0.1}, no_decay=["bias"])

    name = f"{package}.optim.AdamW8bit"
    through, reference, first = fresh(), fresh(), fresh()
    steps(through, made(name, through), 0, 6)
    steps(reference, made("torch.optim.AdamW", reference), 0, 6)
    saved = made(name, first)
    steps(first, saved, 0, 3)
    torch.save(saved.state_dict(), tmp_path / "optimizer.pt")
    second = [(name, nn.Parameter(parameter.detach().clone())) for name, parameter in first]
    resumed = made(name, second)
    load_optimizer(resumed, torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(second, resumed, 3, 6)
    for (_, ours), (_, exact), (_, again) in zip(through, reference, second, strict=True):
        assert (ours - exact).abs().max().item() < 0.01
        assert torch.equal(ours, again)
    moments = [tensor for tensor in _tensors(saved.state_dict()["state"]) if tensor.numel() == 128 * 64]
    assert moments and all(_bytes(tensor) < 2 * tensor.numel() for tensor in moments), "one byte a number, and scales"


def _tensors(tree: Any) -> list[torch.Tensor]:
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tree] if isinstance(tree, torch.Tensor) else [tensor for value in values for tensor in _tensors(value)]


def _bytes(tensor: torch.Tensor) -> int:
    """Of a tensor, or of what a tensor subclass is made of."""
    parts = (
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if hasattr(tensor, "__tensor_flatten__") else [tensor]
    )
    return sum(part.numel() * part.element_size() for part in parts)


def test_weights_of_one_dimension_are_not_decayed_where_megatron_does_not() -> None:
    ours = [(name, nn.Parameter(torch.ones(2) if "norm" in name or "bias" in name else torch.ones(2, 2))) for name in NAMES]
    config = OptimizerConfig(kwargs={"lr": 0.1, "weight_decay": 0.5}, decay_vectors=False, no_decay=("embed",))
    groups = make_optimizer(config, ours).param_groups
    decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    assert decays == {name: 0.5 if name.endswith(("proj.weight", "head.weight")) else 0.0 for name in NAMES}

"""Muon against torch's, which takes matrices alone; on ranks it is compared in parallel/test_parity.py."""

from __future__ import annotations

import copy

import torch
from torch import nn

from support.learners import make_named_optimizer

NAME = "strop.learner.muon.Muon"
KWARGS = {"lr": 0.02, "weight_decay": 0.1}


def make_parameters() -> list[tuple[str, nn.Parameter]]:
    shapes = {"up.weight": (48, 16), "experts.down": (3, 16, 24), "norm.weight": (16,), "embed_tokens.weight": (40, 16)}
    numbers = torch.Generator().manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape, generator=numbers))) for name, shape in shapes.items()]


def step_three_times(parameters: list[tuple[str, nn.Parameter]], optimizers: list[torch.optim.Optimizer]) -> None:
    numbers = torch.Generator().manual_seed(1)
    for _ in range(3):
        for _, parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=numbers)
        for optimizer in optimizers:
            optimizer.step()


def test_matrices_and_experts_step_as_by_torchs_muon_and_the_rest_as_by_adamw() -> None:
    found, wanted = make_parameters(), make_parameters()
    step_three_times(found, [make_named_optimizer(NAME, found, KWARGS)])
    up, experts, norm, embedding = (parameter for _, parameter in wanted)
    slices = [nn.Parameter(expert.detach()) for expert in experts]  # share the memory
    muon = torch.optim.Muon([up, *slices], **KWARGS, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([norm, embedding], **KWARGS)

    def share_gradients() -> None:
        for number, each in enumerate(slices):
            assert experts.grad is not None
            each.grad = experts.grad[number]

    muon.register_step_pre_hook(lambda *args: share_gradients())
    step_three_times(wanted, [muon, adamw])
    for (name, own), (_, other) in zip(found, wanted, strict=True):
        bound = 1e-6 if name.startswith(("norm", "embed")) else 2e-3  # the iterations of matrices are in bfloat16
        assert float((own - other).detach().abs().max()) < bound, name
        assert own.grad is not None


def test_the_step_of_a_matrix_has_the_size_of_adamws_and_all_directions() -> None:
    matrix = nn.Parameter(torch.zeros(64, 32, dtype=torch.float64))
    optimizer = make_named_optimizer(NAME, [("weight", matrix)], {"lr": 1.0, "weight_decay": 0.0})
    matrix.grad = torch.diag(torch.logspace(0, -2, 32, dtype=torch.float64)).repeat(2, 1)
    optimizer.step()
    sizes = torch.linalg.svdvals(matrix.detach()) / (0.2 * 64**0.5)
    assert float(sizes.min()) > 0.6 and float(sizes.max()) < 1.3
    assert 0.1 < float(matrix.detach().square().mean().sqrt()) < 0.3


def test_its_state_is_restored_with_the_number_of_its_parameters() -> None:
    first, second = make_parameters(), make_parameters()
    optimizers = [make_named_optimizer(NAME, parameters, KWARGS) for parameters in (first, second)]
    step_three_times(first, [optimizers[0]])
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for (_, own), (_, other) in zip(first, second, strict=True):
        other.data.copy_(own.data)
    for parameters, optimizer in zip((first, second), optimizers, strict=True):
        step_three_times(parameters, [optimizer])
    assert all(torch.equal(own, other) for (_, own), (_, other) in zip(first, second, strict=True))

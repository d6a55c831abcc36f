"""What Strop makes of an output of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs

from strop.generation.vllm.requests import to_completion
from strop.models.routing.router_config import NO_ROUTE, ROUTES
from strop.sampling import Sampling


@pytest.mark.parametrize("reported", [3, 4, 7])
def test_routes_are_those_of_the_tokens_that_were_read_however_many_vllm_reports(reported: int) -> None:
    """A prompt of three tokens and two sampled ones: the last was sampled and never read."""
    sample = SimpleNamespace(
        token_ids=[8, 9],
        finish_reason="length",
        logprobs=FlatLogprobs(start_indices=[0, 1], end_indices=[1, 2], token_ids=[8, 9], logprobs=[-1.0, -2.0]),
        weight_versions=[SimpleNamespace(start=0, end=2, version=4)],
        routed_experts=np.full((reported, 2, 1), 5),
    )
    output: Any = SimpleNamespace(request_id="7", outputs=[sample], prompt_token_ids=[1, 2, 3])
    completion = to_completion(output, Sampling(), SimpleNamespace(decode=lambda *_, **__: "text"))
    assert completion.versions.tolist() == [4, 4]
    known = min(reported, 4)
    assert completion.columns[ROUTES][:, 0, 0].tolist() == [5] * known + [NO_ROUTE] * (4 - known)

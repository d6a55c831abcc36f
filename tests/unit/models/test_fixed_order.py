"""A network whose passes an extension fixes: learner and engine ask it, and tell it when weights change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from strop.learner.base import require_token_outputs
from strop.learner.torch.scorer import NetworkScorer, copy_frozen
from strop.models.attention.attention_plan import masked_attention
from strop.models.attention.tree_plan import TreePlan
from strop.models.logprobs.token_logprobs import token_logprobs
from strop.models.network import Network
from strop.sampling import Sampling
from support.models import build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.torch_engine import Request, make_engine, make_runner, run_requests


class Counted:
    """The ordinary functions, whose calls are counted; log-probabilities are moved by 1, to be recognised."""

    key_block = 64

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def plan_tree(self, start: Tensor, length: Tensor, parent: Tensor, device: torch.device) -> TreePlan:
        self.calls["plan"] += 1
        return TreePlan(start, length, parent, device)

    def attend_cached(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: Any) -> Tensor:
        self.calls["attend"] += 1
        assert key.shape[2] % self.key_block == 0 or query.shape[2] > 1
        mask = torch.arange(key.shape[2]) <= positions[:, None, :, None]
        return masked_attention(query, key, value, mask, spec)

    def compute_logits(self, hidden: Tensor, head: Any) -> Tensor:
        self.calls["logits"] += 1
        logits: Tensor = head.compute_logits(hidden)
        return logits

    def token_logprobs(self, *inputs: Any, **options: Any) -> Any:
        outputs = token_logprobs(*inputs, **options)
        return type(outputs)(outputs.logprobs + 1, outputs.entropy)

    def sampled_logprobs(self, scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logs = scaled.log_softmax(-1)
        return logs.gather(1, tokens[:, None]).squeeze(1) + 1, -(logs.exp() * logs).sum(-1)

    def forget_weights(self) -> None:
        self.calls["forget"] += 1

    def find_stale(self, weight: Tensor) -> Tensor | None:
        return None

    def restore_modules(self, model: Any) -> None:
        self.calls["restore"] += 1


def test_learner_and_engine_compute_by_the_fixed_order() -> None:
    network = Network(build("qwen2"))
    network.exact = order = Counted()
    sampling = Sampling(max_new_tokens=6, entropy=True)
    requests = [Request([5, 40, 200, 31], sampling, seed=seed) for seed in range(2)]
    completions = run_requests(make_engine(make_runner(network), stop_ids=(2,)), requests)
    assert order.calls["attend"] and order.calls["logits"] and order.calls["forget"]
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    batch = pack_grpo([make_group(*rollouts)])
    scores = require_token_outputs(NetworkScorer(network, sampling, score_tokens=100).score(batch))
    torch.testing.assert_close(scores.logprobs, batch.rollout_logprobs, atol=1e-5, rtol=1e-5)
    assert order.calls["plan"] and float(scores.logprobs.max()) > -6

    frozen = copy_frozen(network)
    assert frozen.exact is None and order.calls["restore"] == 1
    ordinary = require_token_outputs(NetworkScorer(frozen, sampling, score_tokens=100).score(batch))
    torch.testing.assert_close(ordinary.logprobs + 1, scores.logprobs, atol=1e-5, rtol=1e-5)

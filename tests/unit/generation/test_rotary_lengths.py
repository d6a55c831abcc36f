"""Rotary embeddings of every type: one set of frequencies for a run, whatever is read beside a sequence, in learner and engines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from strop.learner.torch.scorer import NetworkScorer
from strop.models.attention.rotary_scaling import fix_rotary_length, fixed_rotary_config
from strop.models.network import Network
from strop.sampling import Sampling
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.sweep import one_in
from support.torch_engine import Request, make_engine, make_paged_runner, make_runner, run_requests

ORIGINAL, LONGEST = 24, 64  # tokens
SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": ORIGINAL,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, **FACTORS},
}
BY_LENGTH = ("dynamic", "longrope")
SAMPLING = Sampling(max_new_tokens=40)


def build_llama(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    parameters = {"rope_type": kind, "rope_theta": 1e4, **SCALINGS[kind]}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters)).eval()


def build_phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(5)
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
    sizes = {**SIZES, "max_position_embeddings": 4 * ORIGINAL, "eos_token_id": 2, "bos_token_id": 1}
    return Phi3ForCausalLM(Phi3Config(**sizes, original_max_position_embeddings=ORIGINAL, rope_parameters=parameters)).eval()


def build_gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(5)
    local, full = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 8.0}
    layers = ["sliding_attention", "full_attention"]
    parameters = dict(zip(layers, (local, full), strict=True))
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=7, layer_types=layers, rope_parameters=parameters)
    return Gemma3ForCausalLM(config).eval()


MODELS = {**{kind: (lambda kind=kind: build_llama(kind)) for kind in SCALINGS}, "phi3": build_phi3, "gemma3": build_gemma3}


def logprobs_alone(model: Any, tokens: list[int]) -> torch.Tensor:
    row = torch.tensor([tokens])
    with torch.no_grad():
        return torch.log_softmax(model(row, use_cache=False).logits[0, :-1], -1).gather(1, row[0, 1:, None])[:, 0]


def test_every_type_that_transformers_knows_is_tested() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {kind for kind in ROPE_INIT_FUNCTIONS if kind not in ("proportional",)} == set(SCALINGS) - {"default"}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_sampler_and_learner_agree_on_short_and_long_rollouts(name: str) -> None:
    model = MODELS[name]()
    fix_rotary_length(model, LONGEST)
    network = Network(model)
    assert network.packed
    requests = [Request([5, 40, 200][: 1 + sample % 3], SAMPLING, seed=sample) for sample in range(3)]
    requests += [Request([7] * 20, Sampling(max_new_tokens=4), seed=9)]  # ends below the original length
    for make in (make_runner, make_paged_runner):
        completions = run_requests(make_engine(make(network), stop_ids=(2,)), requests)
        rollouts = [make_rollout(each.prompt, make_turn(found)) for each, found in zip(requests, completions, strict=True)]
        assert max(rollout.length for rollout in rollouts) > ORIGINAL + 10
        together = pack_grpo([make_group(rollout, index=place) for place, rollout in enumerate(rollouts)])
        scores = NetworkScorer(network, SAMPLING, score_tokens=10_000).score(together).logprobs
        assert float((scores - together.rollout_logprobs).abs().max()) < 2e-5
        alone = [
            NetworkScorer(network, SAMPLING, score_tokens=64).score(pack_grpo([make_group(each)])).logprobs for each in rollouts
        ]
        assert float((torch.cat(alone) - scores).abs().max()) < 5e-6


@pytest.mark.parametrize("name", MODELS)
def test_the_frequencies_are_those_of_transformers_for_the_longest_sequence(name: str) -> None:
    model = MODELS[name]()
    tokens = torch.randint(307, (LONGEST,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logprobs_alone(model, tokens)
    fixed = MODELS[name]()
    fix_rotary_length(fixed, LONGEST)
    assert torch.equal(logprobs_alone(fixed, tokens), expected)
    start = logprobs_alone(fixed, tokens[: ORIGINAL // 2])  # a short sequence reads what the beginning of a long one does
    assert float((start - expected[: len(start)]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_reads_the_same_frequencies_from_the_configuration(name: str) -> None:
    model = MODELS[name]()
    tokens = torch.randint(307, (LONGEST,), generator=torch.Generator().manual_seed(2)).tolist()
    before = copy.deepcopy(model.config.to_dict())
    changes = fixed_rotary_config(model.config, LONGEST)
    assert bool(changes) == (name in (*BY_LENGTH, "phi3", "gemma3")) and model.config.to_dict() == before
    engine = type(model)(type(model.config).from_dict({**model.config.to_dict(), **changes})).eval()
    engine.load_state_dict(model.state_dict())
    fix_rotary_length(model, LONGEST)
    for length in (ORIGINAL // 2, LONGEST):
        assert float((logprobs_alone(engine, tokens[:length]) - logprobs_alone(model, tokens[:length])).abs().max()) < 2e-6


@pytest.mark.parametrize("name", [*BY_LENGTH, "phi3", "gemma3"])
def test_a_run_of_short_sequences_reads_as_transformers_does(name: str) -> None:
    model, fixed = MODELS[name](), MODELS[name]()
    fix_rotary_length(fixed, ORIGINAL)
    tokens = list(range(5, 5 + ORIGINAL))
    assert torch.equal(logprobs_alone(fixed, tokens), logprobs_alone(model, tokens))

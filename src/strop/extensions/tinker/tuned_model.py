"""One model that a client trains: adapters on the base model and their optimizer; and the engine that samples from saved weights."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.base_config import validate_section
from strop.extensions.tinker.wire import (
    ADVANTAGES,
    LOGPROBS,
    TARGETS,
    WEIGHTS,
    AdapterShape,
    ForwardBackwardCall,
    TinkerRequestError,
    TrainingDatum,
    WeightFolders,
    make_batch,
    write_forward_backward,
)
from strop.generation.base import Completion
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.learner.base import require_token_outputs
from strop.learner.model_config import ModelConfig
from strop.learner.torch.learner import TorchLearner
from strop.metrics import Metrics, to_floats
from strop.models.adapters import load_adapters, lora_layers, save_adapters
from strop.runs.models import LoadedPolicy, load_policy
from strop.sampling import Sampling, is_finite, mix_seed
from strop.types import Batch

SAMPLED = (LOGPROBS, ADVANTAGES)
NEEDED: Mapping[str, tuple[str, ...]] = {  # loss -> its inputs besides the targets
    "cross_entropy": (WEIGHTS,),
    "importance_sampling": SAMPLED,
    "ppo": SAMPLED,
    "cispo": SAMPLED,
    "dro": SAMPLED,
}
OPTIONS: Mapping[str, Mapping[str, float]] = {  # loss -> its options, with the SDK's defaults
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}


@dataclass(frozen=True)
class SummedLoss:
    """One of the losses above, with its options."""

    name: str
    options: Mapping[str, float]

    @property
    def needed(self) -> tuple[str, ...]:
        return NEEDED[self.name]

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        loss = -self._objective(outputs.logprobs, batch).sum()
        return loss, {"loss:sum": metrics.total(loss.item())}

    def _objective(self, logprobs: Tensor, batch: Batch) -> Tensor:  # [N]
        if self.name == "cross_entropy":
            return batch.column(WEIGHTS) * logprobs
        difference = logprobs - batch.rollout_logprobs
        if self.name == "dro":
            return batch.advantages * logprobs - 0.5 * self.options["beta"] * difference.square()
        ratio = torch.exp(difference)
        if self.name == "importance_sampling":
            return ratio * batch.advantages
        clipped = ratio.clamp(self.options["clip_low_threshold"], self.options["clip_high_threshold"])
        if self.name == "cispo":
            return clipped.detach() * batch.advantages * logprobs
        return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def make_loss(name: str, given: Mapping[str, float | str]) -> SummedLoss:
    """Return a loss. Raises TinkerRequestError for one that is not served, and for an option that it does not have."""
    if name not in NEEDED:
        raise TinkerRequestError(
            f"the loss {name!r} is not served here; use one of {', '.join(NEEDED)}, or forward_backward_custom: its loss runs in the client"
        )
    options = dict(OPTIONS.get(name, {}))
    for key, value in given.items():
        if key not in options or isinstance(value, str):
            raise TinkerRequestError(f"the loss {name} has no option {key}={value!r}; it has {', '.join(options) or 'none'}")
        options[key] = value
    return SummedLoss(name, options)


# Names of the layers of a transformer block, in the families that Strop trains.
ATTENTION = ("*self_attn*", "*attention*", "*.attn.*")
MLP = ("*mlp*", "*experts*", "*feed_forward*")
ALPHA = 32  # Tinker's scale of adapters
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


def make_model_config(base: dict[str, Any], shape: AdapterShape | None) -> ModelConfig:
    """Return the configuration of the base model, with adapters unless ``shape`` is None. Raises TinkerRequestError."""
    if shape is None:
        return validate_section(ModelConfig, base)
    patterns = (ATTENTION if shape.train_attn else ()) + (MLP if shape.train_mlp else ())
    if not patterns:
        raise TinkerRequestError("neither train_mlp nor train_attn is set, and adapters on the output layer are not served here")
    every = shape.train_attn and shape.train_mlp
    targets = (
        {"match_all_linear": True}
        if every
        else {"exclude_modules": MLP if shape.train_attn else ATTENTION, "match_all_linear": True}
    )
    lora = {"enabled": True, "dim": shape.rank, "alpha": ALPHA, **targets}
    adam = {"lr": 0.0, "betas": [0.9, 0.95], "eps": 1e-12, "weight_decay": 0.0}
    return validate_section(
        ModelConfig,
        {
            **base,
            "dtensor_cfg": {"lora_cfg": lora},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": adam},
            "max_grad_norm": None,
        },
    )


class TunedModel:
    """A learner of adapters. Its methods block, and are called one at a time."""

    def __init__(self, base: dict[str, Any], shape: AdapterShape) -> None:
        """Load the base model and add adapters. Raises TinkerRequestError, ValueError."""
        self.shape = shape
        config = make_model_config(base, shape)
        self.policy: LoadedPolicy = load_policy(config, shape.seed)
        self.learner = TorchLearner(self.policy.network, config, Sampling())

    def forward_backward(self, call: ForwardBackwardCall) -> bytes:
        """Add the gradient of a loss to that of earlier calls, unless it is ``forward_only``. Raises TinkerRequestError."""
        loss = make_loss(call.loss, call.options)
        batch = make_batch(call.data, loss.needed)
        vocabulary = self.policy.network.model.get_input_embeddings().num_embeddings
        if (
            not 0
            <= int(min(batch.tokens.min(), batch.target.min()))
            <= int(max(batch.tokens.max(), batch.target.max()))
            < vocabulary
        ):
            raise TinkerRequestError(f"a token is not in the vocabulary of {vocabulary}")
        run = self.learner.evaluate_loss if call.forward_only else self.learner.forward_backward
        result = run(batch, loss)
        logprobs = require_token_outputs(result.outputs).logprobs.split([len(datum.tokens) for datum in call.data])
        return write_forward_backward(logprobs, {"loss:sum": to_floats(result.metrics)["loss:sum"]})

    def optim_step(self, params: Mapping[str, Any]) -> dict[str, float]:
        """Take a step of AdamW with the gradient so far. Raises TinkerRequestError for other optimizers and values that are none."""
        values = {name: params.get(name) for name in ADAM}
        if any(not is_finite(value) or value < 0 for value in values.values()):
            raise TinkerRequestError(f"adam_params are {params!r:.200}; each of {', '.join(ADAM)} must be a number of at least 0")
        for group in self.learner.optimizer.param_groups:
            group.update(
                lr=values["learning_rate"],
                betas=(values["beta1"], values["beta2"]),
                eps=values["eps"],
                weight_decay=values["weight_decay"],
            )
        self.learner.config = replace(self.learner.config, max_grad_norm=values["grad_clip_norm"] or None)
        measured = to_floats(self.learner.step())
        return {"grad_norm:mean": measured["grad_norm"], "skipped:sum": measured["steps_skipped_for_nonfinite_gradient"]}

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Restore weights, and with ``optimizer`` its state too."""
        self.learner.load(folder)
        if not optimizer:
            self.learner.optimizer.state.clear()

    def save_for_sampler(self, folder: Path) -> None:
        save_adapters(self.policy.network.model, folder)

    @property
    def rank(self) -> int:
        return lora_layers(self.policy.network.model)[0].down.shape[0]


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """A call of ``sample`` or ``compute_logprobs``."""

    prompt: Sequence[int]
    sampling: Sampling
    count: int
    seed: int
    prompt_logprobs: bool = False


@dataclass(eq=False)
class _LoadedWeights:
    policy: LoadedPolicy
    engine: TorchEngine
    users: int = 0

    async def sample(self, call: SampleCall) -> tuple[list[Completion], Tensor | None]:
        requests = (
            self.engine.generate(call.prompt, sampling=call.sampling, seed=mix_seed(call.seed, index))
            for index in range(call.count)
        )
        completions = await asyncio.gather(*requests)
        return completions, self._score(call.prompt) if call.prompt_logprobs else None

    @torch.no_grad()
    def _score(self, prompt: Sequence[int]) -> Tensor:  # [P], NaN for the first token
        tokens = torch.tensor([*prompt], dtype=torch.int64)
        scores = torch.full((len(tokens),), float("nan"))
        if len(tokens) > 1:
            batch = make_batch([TrainingDatum(tokens[:-1], {TARGETS: tokens[1:]})], ())
            scores[1:] = self.policy.network.outputs(batch, Sampling()).logprobs.cpu()
        return scores


class WeightSampler:
    """Keeps the engines of the weights that were used last."""

    def __init__(self, base: dict[str, Any], folders: WeightFolders, *, length: int, kv_cache_gb: float, limit: int = 2) -> None:
        """``limit``: engines that are kept, besides those in use."""
        self._base, self._folders, self._length, self._kv_cache_gb, self._limit = base, folders, length, kv_cache_gb, limit
        self._loaded: OrderedDict[str | None, _LoadedWeights] = OrderedDict()
        self._loading = asyncio.Lock()

    async def sample(self, address: str | None, call: SampleCall) -> tuple[list[Completion], Tensor | None]:
        """Sample with the weights saved at an address; None: with the base model. Raises TinkerRequestError, InvalidRequest."""
        weights = await self._use(address)
        try:
            return await weights.sample(call)
        finally:
            weights.users -= 1

    async def _use(self, address: str | None) -> _LoadedWeights:
        async with self._loading:
            loaded = self._loaded.get(address)
            if loaded is not None and loaded.engine.failure is not None:  # load it again: it no longer serves clients
                await self._loaded.pop(address).engine.close()
            if address not in self._loaded:
                self._loaded[address] = await asyncio.to_thread(self._load, address)
                self._loaded[address].engine.resume(0)
            weights = self._loaded[address]
            weights.users += 1
            self._loaded.move_to_end(address)
            await self._drop_unused()
            return weights

    def _load(self, address: str | None) -> _LoadedWeights:
        folder, shape = (None, None) if address is None else self._folders.find(address)
        policy = load_policy(make_model_config(self._base, shape))
        if folder is not None:
            load_adapters(policy.network.model, folder)
        config = validate_section(TorchGenerationConfig, {"kv_cache_memory_gb": self._kv_cache_gb})
        engine = make_torch_engine(policy.network, policy.tokenizer, config, length=self._length, stop_ids=policy.stop_ids)
        return _LoadedWeights(policy, engine)

    async def _drop_unused(self) -> None:
        idle = [address for address, weights in self._loaded.items() if not weights.users]
        for address in idle[: max(len(self._loaded) - self._limit, 0)]:
            await self._loaded.pop(address).engine.close()

    async def close(self) -> None:
        for weights in self._loaded.values():
            await weights.engine.close()

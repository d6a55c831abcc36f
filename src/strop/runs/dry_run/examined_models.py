"""Checks of models before anything is loaded: networks on the meta device, sizes, optimizers, chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from strop.base_config import BaseConfig, iter_sections
from strop.config import EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import list_trained_models
from strop.environments.handle import EnvironmentHandle
from strop.learner.learner_config import policy_extensions
from strop.learner.model_config import ModelConfig, ScoringModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.torch.optimizer_config import KNOWN_OPTIMIZERS, KNOWN_SCHEDULERS, OptimizerConfig, ScheduleStageConfig
from strop.learner.torch.schedules import make_schedule
from strop.models.local_files import ModelShape, find_local_file, list_divisors, read_local_config
from strop.models.model_sizes import read_model_sizes, read_tokenizer_files
from strop.models.tokenizer_config import TokenizerConfig, read_chat_template
from strop.problems import Problem
from strop.runs.learner_backend import load_backend
from strop.tools.call_formats import FORMATS
from strop.user_code import describe_error, suggest_names

Check = Callable[[Any], object]  # takes a Network, and raises ValueError


def find_network_problems(config: TrainingRunConfig) -> Iterator[Problem]:
    """Yield why models cannot be divided, adapted or rounded as configured."""
    models: dict[str, ModelConfig | ScoringModelConfig] = dict(list_trained_models(config))
    models |= {key: each for key, each in config.scoring_models.items() if each.on_ranks}
    for key, model in models.items():
        if values := read_local_config(model.model_name):
            yield from load_backend(model.learner).examine(config, key, model, values)
    if isinstance(config, RolloutRunConfig):
        yield from _check_router_replay(config)
    if isinstance(config, RolloutRunConfig) and config.policy.generation.uses_vllm:
        yield from _check_vllm(config)


def examine_torch_model(
    config: TrainingRunConfig, key: str, model: ModelConfig | ScoringModelConfig, values: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield why the torch learner cannot divide, adapt or round a model as configured."""
    scores = key == "value" or config.trains_scores
    checks = _list_checks(model, count_devices(config).learner_devices)
    if checks or scores or getattr(model, "hf_config_overrides", None) or "quantization_config" in values:
        yield from _ask(key, model, checks, scores=scores, trusted=config.policy.trust_remote_code)


def _check_router_replay(config: RolloutRunConfig) -> Iterator[Problem]:
    name, replay = config.policy.model_name, config.policy.router_replay
    values = json.dumps(read_local_config(name)) if replay.enabled or replay.indexers else ""
    for key, wanted, word, what in (
        ("enabled", replay.enabled, "expert", "experts"),
        ("indexers", replay.indexers, "index_topk", "indexers that choose tokens"),
    ):
        if wanted and len(values) > 2 and word not in values:
            yield Problem(f"policy.router_replay.{key}", f"found true, but {name} has no {what}", "Set it to false.")


def _check_vllm(config: RolloutRunConfig) -> Iterator[Problem]:
    """vLLM divides the attention heads; there may be fewer key and value heads than ranks, which then hold copies."""
    from strop.generation.vllm.supported_models import find_cpu_problems

    size, name = config.policy.generation.vllm_cfg.tensor_parallel_size, config.policy.model_name
    values = read_local_config(name)
    if config.policy.device == "cpu":
        yield from find_cpu_problems(values, config.policy.generation.vllm_cfg, "policy.generation")
    shape = ModelShape.from_hf(name, values) if size > 1 else None
    if shape is not None and (shape.heads % size or (shape.key_value_heads % size and size % shape.key_value_heads)):
        heads = f"{shape.heads} attention heads ({shape.key_value_heads} key-value heads)"
        message = f"found {size}, by which vLLM cannot divide the {heads} of {name}"
        yield Problem("policy.generation.vllm_cfg.tensor_parallel_size", message, list_divisors(shape.heads))


def _list_checks(model: ModelConfig | ScoringModelConfig, ranks: int) -> dict[str, Check]:
    """Return the checks of a network, by their key; none for one that is trained whole on one device."""
    checks: dict[str, Check] = {}
    if isinstance(model, ModelConfig) and model.dtensor_cfg.lora_cfg.enabled:
        from strop.models.lora import find_target_layers

        checks["dtensor_cfg.lora_cfg.target_modules"] = lambda network: find_target_layers(
            network.model, model.dtensor_cfg.lora_cfg
        )
    for extension in policy_extensions(model):
        checks |= extension.network_checks()
    return checks | {f"dtensor_cfg.{name}": check for name, check in _list_divisions(model.dtensor_cfg, ranks)}


def _list_divisions(sizes: DtensorConfig, ranks: int) -> Iterator[tuple[str, Check]]:
    """Yield the checks of a network that ranks share, by key."""
    if max(sizes.tensor_parallel_size, sizes.expert_parallel_size, sizes.pipeline_parallel_size) == 1:
        return
    from strop.learner.parallel.expert_parallel import check_experts
    from strop.learner.parallel.parallel_dims import ParallelDims
    from strop.learner.parallel.pipeline.pipeline_stages import PipelineStages
    from strop.learner.parallel.tensor_plan import find_regions, load_tensor_plan

    dims, plan = ParallelDims.from_config(sizes, ranks), sizes.custom_parallel_plan
    if dims.tensor > 1:
        load = partial(load_tensor_plan, plan) if plan is not None else lambda: None
        yield "tensor_parallel_size", lambda network: find_regions(network.model, dims, load())
    yield "expert_parallel_size", lambda network: check_experts(network.model, dims)
    if dims.pipeline > 1:
        yield "pipeline_parallel_size", lambda network: PipelineStages(network, dims)


def _ask(
    key: str, model: ModelConfig | ScoringModelConfig, checks: Mapping[str, Check], *, scores: bool, trusted: bool
) -> Iterator[Problem]:
    """``scores``: the model is a classifier, a reward model or critic. ``trusted``: a run may execute the model's own code; this
    function does not.
    """
    from strop.models.loading import build_on_meta
    from strop.models.network import Network
    from strop.models.value_network import to_classifier_config

    options: dict[str, Any] = {"to_classifier": to_classifier_config if scores else None}
    if isinstance(model, ModelConfig):
        options |= {"overrides": model.hf_config_overrides, "dequantize": model.dequantize_base_checkpoint}
    try:
        network = Network(build_on_meta(model.model_name, **options), packed=True)
    except ValueError as error:
        if not (trusted and "trust_remote_code" in str(error)):
            yield Problem(f"{key}.model_name", str(error).removeprefix("policy.model_name: "))
        return
    except Exception as error:  # errors of the model's class, also raised by loading it
        yield Problem(f"{key}.model_name", f"its config.json makes no model here: {describe_error(error)}")
        return
    for name, check in checks.items():
        try:
            check(network)
        except ValueError as error:
            yield Problem(f"{key}.{name}", str(error).removeprefix(f"{key}.{name}: ").removeprefix(f"{name}: "))


def find_optimizer_problems(config: TrainingRunConfig) -> Iterator[Problem]:
    """Yield what a run's optimizers and schedulers reject. If their arguments are not known here, one is created for a single
    weight.
    """
    for key, model in list_trained_models(config):
        yield from _find_problems(key, model)


def _find_problems(key: str, model: ModelConfig) -> Iterator[Problem]:
    scheduler = model.scheduler
    named = [stage for stage in scheduler.stages if "." not in stage.name] if scheduler is not None else []
    try:
        for stage in named:
            make_schedule(stage.name, stage.kwargs, total_steps=1_000_000, section=key)
    except ValueError as error:
        yield Problem("", str(error))
        return
    if _is_known(model.optimizer) and all(map(_is_known_stage, scheduler.stages if scheduler is not None else ())):
        return
    import torch

    from strop.learner.torch.optimizer import make_optimizer, make_scheduler

    try:
        alone = replace(model.optimizer, groups=(), no_decay=())
        optimizer = make_optimizer(alone, [("weight", torch.nn.Parameter(torch.zeros(2, 2)))], section=key)
        make_scheduler(scheduler, optimizer, total_steps=1_000_000, section=key)
    except (ValueError, TypeError) as error:
        message = str(error)
        yield Problem("" if message.startswith(key) else f"{key}.optimizer", message)


def _is_known_stage(stage: ScheduleStageConfig) -> bool:
    """Return whether a schedule was checked here, or is a torch scheduler with known arguments within their ranges."""
    known = KNOWN_SCHEDULERS.get(stage.name)
    if "." not in stage.name or known is None:
        return known is None and "." not in stage.name
    required = {"T_max"} & set(known) <= set(stage.kwargs)
    return required and all(name in known and _is_in(value, *known[name]) for name, value in stage.kwargs.items())


def _is_in(value: object, low: float, high: float) -> bool:
    is_number = isinstance(value, int if isinstance(low, int) else int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high  # type: ignore[operator]  # a number


def _is_known(optimizer: OptimizerConfig) -> bool:
    """Return whether a check of the section has covered all arguments."""
    return set(optimizer.kwargs) <= KNOWN_OPTIMIZERS.get(optimizer.name, frozenset())


GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Transformers' own tag around the model's text


def find_template_problems(config: BaseConfig) -> Iterator[Problem]:
    """Yield a problem for each chat template that is not valid Jinja, and each tool call format that does not exist."""
    for key, section in iter_sections(config):
        name = section.tool_call_format if isinstance(section, TokenizerConfig) else None
        if name is not None and name not in FORMATS:
            yield Problem(f"{key}.tool_call_format", f"there is no tool call format {name!r}{suggest_names(name, FORMATS)}")
    texts = {
        f"{key}.chat_template": section.chat_template
        for key, section in iter_sections(config)
        if isinstance(section, TokenizerConfig) and section.chat_template not in (None, "default", "passthrough")
    }
    if not texts:
        return
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    reported = set()
    for key, text in texts.items():
        try:
            environment.parse(GENERATION.sub("", text or ""))
        except jinja2.TemplateSyntaxError as error:
            if text not in reported:
                reported.add(text)
                message = f"it is no Jinja template: {error.message} in its line {error.lineno}"
                yield Problem(key, message, "Mend the template, or set it to default, the tokenizer's own.")


def find_conversation_problems(
    config: RolloutRunConfig | EvalRunConfig, environments: Iterable[EnvironmentHandle[Any]]
) -> Iterator[Problem]:
    """Yield why the chat template of a local tokenizer cannot render the environments' tools or turns."""
    section, key = (
        (config.tokenizer, "tokenizer") if isinstance(config, EvalRunConfig) else (config.policy.tokenizer, "policy.tokenizer")
    )
    speaking = [each for each in environments if each.traits.responds]
    file = find_local_file(section.name, "tokenizer_config.json") if speaking else None
    if file is None:
        return
    from strop.models.chat_template import ChatTemplate
    from strop.models.loading import ModelNotFound, RemoteCodeRefused, load_tokenizer
    from strop.rollouts.policy_turns import describe_tool_calls
    from strop.types import user

    try:
        template = ChatTemplate(
            load_tokenizer(str(file.parent), chat_template=section.chat_template), options=section.chat_template_kwargs
        )
        describe_tool_calls(speaking, template, section.tool_call_format)
        template.encode_observation([user("?")], ())
    except (ModelNotFound, RemoteCodeRefused):
        return  # reported when the model is loaded
    except Exception as error:  # of the template, which may raise any exception
        yield Problem(key, str(error) if isinstance(error, ValueError) else f"the chat template fails: {describe_error(error)}")


@dataclass(frozen=True)
class SizedModel:
    """A token-reading model of a run, with the keys that name it and limit its input."""

    key: str
    name: str
    tokenizer: str
    chat_template: str | None
    overrides: dict[str, object]
    length: int
    length_key: str

    @property
    def tokenizer_key(self) -> str:
        return f"{self.key}.model_name" if self.tokenizer == self.name else f"{self.key}.tokenizer.name"


def find_size_problems(config: TrainingRunConfig | EvalRunConfig) -> tuple[list[Problem], list[Problem]]:
    """Return the errors and warnings for every model of a run with local files."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    for model in _list_models(config):
        sizes = read_model_sizes(model.name, model.overrides)
        if sizes is None:
            continue
        try:
            template = read_chat_template(model.chat_template)
        except ValueError:  # said by the section
            continue
        tokenizer = read_tokenizer_files(model.tokenizer, template)
        found = (tokenizer, model.tokenizer_key, model.length, model.length_key)
        errors += sizes.errors(*found)
        warnings += sizes.warnings(*found)
    return list(dict.fromkeys(errors)), list(dict.fromkeys(warnings))


def _list_models(config: TrainingRunConfig | EvalRunConfig) -> Iterator[SizedModel]:
    if isinstance(config, EvalRunConfig):
        generation, tokenizer = config.generation, config.tokenizer
        length, length_key = generation.max_total_sequence_length, "generation.vllm_cfg.max_model_len"
        yield SizedModel("generation", generation.model_name, tokenizer.name, tokenizer.chat_template, {}, length, length_key)
        return
    length, length_key = config.policy.max_total_sequence_length, "policy.max_total_sequence_length"
    for key, model in list_trained_models(config):
        overrides = dict(model.hf_config_overrides or {})
        yield SizedModel(
            key, model.model_name, config.policy.tokenizer.name, model.tokenizer.chat_template, overrides, length, length_key
        )
    for key, scoring in config.scoring_models.items():
        yield SizedModel(key, scoring.model_name, scoring.tokenizer.name, None, {}, length, length_key)

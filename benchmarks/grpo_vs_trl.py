"""GRPO in TRL and in Strop, alternating steps on one CPU, with the same model, prompts, reward, optimizer, dtype and threads.

    pip install -e '.[bench]'        python benchmarks/grpo_vs_trl.py --steps 5 --dtype both --json results.json

Each side has its own process, so that memory is measured separately and threads and patches do not affect the other side. This process
coordinates: one side computes while the other waits at a step boundary. Pairs of steps run A B, B A, A B, ...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import (
    DISTURBED,
    MODEL,
    Command,
    ModelShape,
    Profile,
    Ready,
    Result,
    Settings,
    Side,
    SideFailed,
    SideProcess,
    StepRecord,
    TurnTimer,
    as_json,
    machine_line,
    memory,
    order,
    padded_pairs,
    prepare_model,
    report,
    reset_peak_memory,
    run_in_subprocess,
    save,
    tree_pairs,
    use_threads,
    versions,
    wait_for_quiet,
)

ENVIRONMENT = "arithmetic"


# ---- the TRL side ------------------------------------------------------------------------------------------------------------


def trl_configuration(settings: Settings) -> dict[str, Any]:
    """Return TRL's fastest settings on a CPU for the same algorithm as Strop's; benchmarks/README.md explains each."""
    rows = settings.prompts * settings.completions
    parts = rows // settings.trl_rows
    return {
        # one optimizer step = one batch of generations: on-policy, no reference model
        "per_device_train_batch_size": settings.trl_rows,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_iterations": 1,
        "num_generations": settings.completions,
        "max_steps": settings.total_steps,
        "shuffle_dataset": False,
        # the algorithm
        "beta": 0.0,
        "loss_type": "dapo",  # mean over all tokens of the step
        "scale_rewards": "group",
        "epsilon": 0.2,
        "mask_truncated_completions": False,
        "max_completion_length": settings.max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "optim": "adamw_torch_fused",
        "learning_rate": settings.learning_rate,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        # fastest on a CPU
        "use_cpu": True,
        "bf16": settings.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "use_vllm": False,
        "use_transformers_continuous_batching": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "log_completions": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": settings.seed,
        "output_dir": f"{settings.folder}/trl",
    }


def trl_malloc_side(settings: Settings, baton: Connection) -> None:
    """Train with GRPOTrainer in a process that keeps freed memory, as Strop's does."""
    trl_side(replace(settings, trl_reuse_memory=True), baton, side="trl_malloc")


def trl_side(settings: Settings, baton: Connection, side: Side = "trl") -> None:
    """Train with GRPOTrainer, returning the turn after every optimizer step."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    from strop.environments.answers import extract_last_number
    from strop.learner.budget.device_memory import reuse_freed_memory
    from strop.models.loading import load_model, load_tokenizer

    torch.set_num_threads(settings.threads)
    tasks = asyncio.run(training_rows(settings))
    laps = TurnTimer()
    last: dict[str, Any] = {}

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            with laps("generate"):
                return super()._generate_single_turn(*args, **kwargs)  # type: ignore[no-untyped-call]

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with laps("generation"):
                found = super()._generate_and_score_completions(inputs)
            last.update(found)
            return found

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with laps("training_step"):
                return super().training_step(*args, **kwargs)  # type: ignore[no-untyped-call]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [
            float(index % 2) if settings.same_work else float(extract_last_number(text[0]["content"]) == int(wanted))
            for index, (text, wanted) in enumerate(zip(completions, answer, strict=True))
        ]
        last["reward"] = sum(found) / len(found)
        return found

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            baton.send(ready)
            baton.recv()
            laps.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            baton.send(record(state.global_step))
            if state.global_step < settings.total_steps:
                baton.recv()
                laps.start()

    def record(step: int) -> StepRecord:
        seconds, spent = laps.stop()
        rows, length = last["completion_ids"].shape[0], last["prompt_ids"].shape[1] + last["completion_ids"].shape[1]
        backward = spent["training_step"] - spent["generation"]
        ended = laps.since("training_step")
        return StepRecord(
            side=side,
            step=step,
            seconds=seconds,
            generation=spent["generation"],
            training=backward + ended,
            phases={
                "generate": spent["generate"],
                "tokenize, score": spent["generation"] - spent["generate"],
                "forward, backward": backward,
                "clip, optimizer": ended,
            },
            prompt_tokens=int(last["prompt_mask"].sum(1)[:: settings.completions].sum()),
            sampled_tokens=int(last["completion_mask"].sum()),
            tokens_read=rows * length,
            head_rows=rows * (length - 1),  # without Triton, TRL applies the output layer to prompts and padding too
            attention_pairs=padded_pairs(rows, length),
            reward=last["reward"],
            peak_memory=memory(),
            foreign=laps.foreign(),
        )

    if settings.trl_reuse_memory:
        reuse_freed_memory()
    model = load_model(settings.model)
    if settings.trl_bf16_weights:
        model = model.to(torch.bfloat16)
    configuration = trl_configuration(settings)
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**configuration),
        train_dataset=Dataset.from_list(tasks),
        processing_class=load_tokenizer(settings.model),
        callbacks=[Turns()],
    )
    trainer.remove_callback(PrinterCallback)
    if settings.same_work:
        ignore_end_tokens(trainer)
    first, *_ = trainer._tokenize_prompts([row["prompt"] for row in tasks[: settings.prompts]])
    ready = Ready(memory("VmRSS"), [list(ids) for ids in first], sorted(trainer.eos_token_ids), configuration)
    reset_peak_memory()
    trainer.train()
    baton.recv()
    save(trainer.model.float(), load_tokenizer(settings.model), f"{settings.folder}/trained_{side}")
    baton.send(None)


def ignore_end_tokens(trainer: Any) -> None:
    """Let no token end a completion: each is then as long as it may be."""
    trainer.eos_token_ids = []
    trainer.generation_kwargs["eos_token_id"] = None
    trainer.generation_config.eos_token_id = trainer.model.generation_config.eos_token_id = None


# ---- the Strop side ----------------------------------------------------------------------------------------------------------


def strop_config(settings: Settings, model: str) -> Any:
    """Return a user's configuration, with metrics.jsonl and stored rollouts enabled."""
    from strop.config import GrpoRunConfig, load_config

    overrides = [
        f"policy.model_name={model}",
        "policy.device=cpu",
        f"policy.precision={settings.dtype}",
        f"policy.num_threads={settings.threads}",
        f"policy.max_total_sequence_length={settings.max_tokens + 192}",
        f"policy.sequence_packing.train_mb_tokens={settings.prompts * (192 + settings.completions * settings.max_tokens)}",
        f"policy.optimizer.kwargs={{lr: {settings.learning_rate!r}, weight_decay: 0.0, betas: [0.9, 0.999], eps: 1.0e-8}}",
        "policy.max_grad_norm=1.0",
        f"policy.generation.max_new_tokens={settings.max_tokens}",
        f"grpo.num_prompts_per_step={settings.prompts}",
        f"grpo.num_generations_per_prompt={settings.completions}",
        f"grpo.max_num_steps={settings.total_steps + settings.profile}",
        "grpo.max_num_epochs=null",
        "grpo.val_period=0",
        f"grpo.seed={settings.seed}",
        "loss_fn.reference_policy_kl_penalty=0.0",
        "loss_fn.ratio_clip_min=0.2",
        "loss_fn.ratio_clip_max=0.2",
        "checkpointing.enabled=false",
        f"logger.log_dir={settings.folder}/strop",
        "logger.console=none",
        f"data.train={{env_name: {ENVIRONMENT}}}",
        f"data.validation={{env_name: {ENVIRONMENT}, size: 1000, seed: 7}}",
        f"env={{{ENVIRONMENT}: {{}}}}",
    ]
    return load_config(None, overrides, root=GrpoRunConfig).config


async def training_rows(settings: Settings) -> list[dict[str, Any]]:
    """Return the prompts of Strop's stream in order, as rows for TRL."""
    from strop.runs.tasks import make_training_tasks

    config = strop_config(settings, settings.model)
    source = make_training_tasks(config)
    found = (source.at(index) for index in range(settings.prompts * settings.total_steps))
    return [
        {"prompt": [message.as_dict() for message in await environment.prompt(task)], "answer": task.answer}
        for _, environment, task in found
    ]


def strop_side(settings: Settings, baton: Connection) -> None:
    """Train with Strop's own loop, returning the turn after each logged step."""
    from strop.base_config import to_tree
    from strop.generation.torch.torch_engine import TorchEngine
    from strop.models.chat_template import ChatTemplate
    from strop.monitoring.trackers.base import NullTracker
    from strop.runs.lifecycle import make_tracker
    from strop.runs.open_run import open_run
    from strop.runs.run_algorithm import make_run_algorithm
    from strop.trainer.train import train
    from strop.types import Batch, Group, Message
    from strop.weight_sync.in_process import InProcessWeights

    config = strop_config(settings, settings.model)
    laps = TurnTimer()
    groups: list[Group] = []
    batches: list[Batch] = []
    profilers: dict[str, Any] = {}

    class Stream:
        """Records the sampled groups; for the same work on both sides, with alternating rewards."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def next(self) -> Group:
            group: Group = await self.inner.next()
            if settings.same_work:
                group = replace(group, rollouts=tuple(replace(each, reward=float(each.sample % 2)) for each in group.rollouts))
            groups.append(group)
            return group

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Learner:
        """Measures the learner's time from outside."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def forward_backward(self, batch: Batch, loss: Any) -> Any:
            batches.append(batch)
            with laps("forward, backward"), profiling("training"):
                return await self.inner.forward_backward(batch, loss)

        async def step(self) -> Any:
            with laps("clip, optimizer"):
                return await self.inner.step()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Weights:
        """Stops the generation profiler when the engine yields the device."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def yield_device(self) -> None:
            await self.inner.yield_device()
            if "generation" in profilers:
                profilers["generation"].stop()

        async def publish(self, version: int) -> Any:
            return await self.inner.publish(version)

    class Turns(NullTracker):
        """Ends the turn when the step logs, which is its last action."""

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            tracker.log(step, metrics)
            if profilers:
                baton.send(Profile({phase: own_seconds(profiler) for phase, profiler in profilers.items()}))
                return
            baton.send(record(step, metrics))
            if step < settings.total_steps + settings.profile:
                take_turn(baton.recv())

    def take_turn(command: Command) -> None:
        groups.clear()
        batches.clear()
        if command == "profile":
            profilers["generation"] = start_profiler()
        laps.start()

    @contextmanager
    def profiling(phase: str) -> Iterator[None]:
        if profilers:
            profilers[phase] = start_profiler()
        yield
        if profilers:
            profilers[phase].stop()

    def record(step: int, metrics: Mapping[str, float]) -> StepRecord:
        seconds, spent = laps.stop()
        timing = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("timing/train/")}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        publishing = timing["weight_sync"] + timing["drain"]
        return StepRecord(
            side="strop",
            step=step,
            seconds=seconds,
            generation=timing["generation"] + publishing,
            training=timing["logprobs"] + timing["policy_training"],
            phases={
                "generate, score": timing["generation"],
                "weights to the engine": publishing,
                **spent,
                "batch metrics": timing["policy_training"] - sum(spent.values()),
            },
            prompt_tokens=sum(len(group.rollouts[0].prompt) for group in groups),
            sampled_tokens=sum(rollout.sampled_tokens for rollout in rollouts),
            tokens_read=sum(len(batch.tokens) for batch in batches),
            head_rows=sum(len(batch.target) for batch in batches),
            attention_pairs=sum(tree_pairs(batch.segment_length.tolist(), batch.segment_parent.tolist()) for batch in batches),
            reward=sum(rollout.reward for rollout in rollouts) / len(rollouts),
            peak_memory=memory(),
            foreign=laps.foreign(),
        )

    async def run_all() -> TorchEngine:
        async with open_run(config, make_run_algorithm(config), Turns()) as run:
            assert isinstance(run.weights, InProcessWeights)
            (generator,) = run.weights.generators
            assert isinstance(generator, TorchEngine)
            run.stream, run.weights = Stream(run.stream), Weights(run.weights)
            run.learners = {"policy": Learner(run.learners["policy"])}
            if settings.same_work:
                generator.stop_ids = frozenset()
            template = ChatTemplate(generator.tokenizer)
            asked = [
                [Message(**message) for message in row["prompt"]] for row in (await training_rows(settings))[: settings.prompts]
            ]
            prompts = [template.encode_prompt(messages) for messages in asked]
            baton.send(Ready(memory("VmRSS"), prompts, sorted(generator.stop_ids), to_tree(config)))
            baton.recv()
            reset_peak_memory()
            laps.start()
            await train(run)
        return generator

    tracker = make_tracker(config)
    generator = asyncio.run(run_all())
    tracker.close()
    baton.recv()
    save(generator.runner.network.model, generator.tokenizer, f"{settings.folder}/trained_strop")  # type: ignore[attr-defined]
    baton.send(None)


def start_profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU])
    profiler.start()
    return profiler


def own_seconds(profiler: Any) -> dict[str, float]:
    return {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages() if event.self_cpu_time_total}


# ---- in separate processes: evaluation and machine measurements -------------------------------------------------------------------


def model_shape(folder: str) -> ModelShape:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=head_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
    )


def held_out_reward(settings: Settings, model: str, tasks: int, samples: int) -> tuple[float, float]:
    """Return the mean reward on held-out sums at temperature 1, sampled by Strop's engine, and its standard error over tasks."""
    from strop.generation.torch.torch_engine import make_torch_engine
    from strop.runs.evaluation_job import make_episode_rules
    from strop.runs.models import load_policy
    from strop.runs.tasks import make_validation_tasks
    from strop.sampling import Sampling
    from strop.trainer.evaluation import Evaluator

    config = strop_config(settings, model)
    policy = load_policy(config.policy)
    source = make_validation_tasks(config)
    assert source is not None

    async def evaluate() -> list[float]:
        length = config.policy.max_total_sequence_length
        engine = make_torch_engine(
            policy.network, policy.tokenizer, config.policy.generation.torch_cfg, length=length, stop_ids=policy.stop_ids
        )
        engine.resume(0)
        evaluator = Evaluator(
            source=source,
            size=tasks,
            samples=samples,
            generator=engine,
            template=policy.template,
            sampling=Sampling(**config.policy.generation.sampling_options()),
            rules=make_episode_rules(config),
            seed=settings.seed,
        )
        await evaluator.evaluate(0)
        await engine.close()
        return [float(group.rewards.mean()) for group in evaluator.last_groups]

    means = asyncio.run(evaluate())
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / max(len(means) - 1, 1)
    return mean, (variance / len(means)) ** 0.5


def matrix_rates(settings: Settings, shape: ModelShape, tokens: int, predicted: int) -> dict[str, float]:
    """Return the GFLOP/s of matrix products in the run's dtype: 2048 x 2048 x 2048, and all products of a training step."""
    import torch

    torch.set_num_threads(settings.threads)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32

    def product(m: int, k: int, n: int, *, left: bool = False, right: bool = False) -> float:
        """Return the seconds of [m, k] @ [k, n]. ``left``, ``right``: this operand is stored transposed, as in training."""
        a = torch.randn(k, m, dtype=torch.float32).to(dtype).t() if left else torch.randn(m, k).to(dtype)
        b = torch.randn(n, k, dtype=torch.float32).to(dtype).t() if right else torch.randn(k, n).to(dtype)
        a @ b
        found = []
        for _ in range(5):
            started = time.perf_counter()
            a @ b
            found.append(time.perf_counter() - started)
        return min(found)

    def linear(rows: int, width: int, out: int, forwards: int = 1) -> tuple[float, float]:
        """Return (FLOPs, seconds) of x @ W^T (``forwards`` times) and of the gradients of x and W."""
        seconds = (
            forwards * product(rows, width, out, right=True) + product(rows, out, width) + product(out, rows, width, left=True)
        )
        return (4 + 2.0 * forwards) * rows * width * out, seconds

    square = 2 * 2048**3 / product(2048, 2048, 2048) / 1e9
    layers = [linear(tokens, width, out) for width, out in shape.linears]
    layer_flops, layer_seconds = (shape.layers * sum(column) for column in zip(*layers, strict=True))
    head_flops, head_seconds = 0.0, 0.0
    for start in range(0, predicted, 1024):
        flops, seconds = linear(min(1024, predicted - start), shape.hidden, shape.vocabulary, forwards=2)
        head_flops, head_seconds = head_flops + flops, head_seconds + seconds
    return {
        "2048 x 2048 x 2048": square,
        "layers, training shapes": layer_flops / layer_seconds / 1e9,
        "output layer, training shapes": head_flops / head_seconds / 1e9,
        "whole step, training shapes": (layer_flops + head_flops) / (layer_seconds + head_seconds) / 1e9,
    }


def compare(settings: Settings, *, tasks: int, samples: int, patience: float = 0) -> Result:
    """Alternate the two sides, then evaluate both models and measure the machine."""
    bodies = {"trl": trl_side, "trl_malloc": trl_malloc_side, "strop": strop_side}
    players: dict[Side, SideProcess] = {}
    ready: dict[Side, Ready] = {}
    for side in settings.sides:  # load one after the other
        players[side] = SideProcess(side, bodies[side], settings)
        ready[side] = players[side].receive(Ready)
    for name in ("prompts", "stop_ids"):
        if getattr(ready["trl"], name) != getattr(ready["strop"], name):
            raise SideFailed(
                f"the sides differ in their {name}: {getattr(ready['trl'], name)} and {getattr(ready['strop'], name)}"
            )
    records: dict[Side, list[StepRecord]] = {side: [] for side in settings.sides}
    for pair in range(settings.total_steps):
        for side in order(pair, settings.sides):
            wait_for_quiet(patience)
            record: StepRecord = players[side].turn("step", StepRecord)
            show(record, warm=pair < settings.warmup)
            check_work(record, settings)
            if pair >= settings.warmup:
                records[side].append(record)
    profile: Profile | None = players["strop"].turn("profile", Profile) if settings.profile else None
    for player in players.values():
        player.turn("finish", type(None))
        player.process.join()
    shape: ModelShape = run_in_subprocess(model_shape, settings.model)
    print("  measuring the machine, and rewards on held-out sums", flush=True)
    wait_for_quiet(patience)
    typical = sorted(records["strop"], key=lambda record: record.tokens_read)[len(records["strop"]) // 2]
    rates: dict[str, float] = run_in_subprocess(matrix_rates, settings, shape, typical.tokens_read, typical.head_rows)
    models = {"before": settings.model, **{side: f"{settings.folder}/trained_{side}" for side in settings.sides}}
    held_out = (
        {name: run_in_subprocess(held_out_reward, settings, model, tasks, samples) for name, model in models.items()}
        if tasks
        else {}
    )
    return Result(settings=settings, ready=ready, records=records, rates=rates, shape=shape, held_out=held_out, profile=profile)


def check_work(record: StepRecord, settings: Settings) -> None:
    """Raises SideFailed for a step of the same work whose completions are not all as long as they may be."""
    wanted = settings.prompts * settings.completions * settings.max_tokens
    if settings.same_work and record.sampled_tokens != wanted:
        raise SideFailed(f"the {record.side} side sampled {record.sampled_tokens} tokens in step {record.step}, not {wanted}")


def show(record: StepRecord, *, warm: bool) -> None:
    times = f"{record.seconds:7.2f} s  generation {record.generation:6.2f}  training {record.training:6.2f}"
    rest = f"sampled {record.sampled_tokens}  reward {record.reward:.3f}{'  (warm-up)' if warm else ''}"
    rest += f"  (others: {record.foreign:.1f} cores)" if record.foreign > DISTURBED else ""
    print(f"  step {record.step:2} {record.side:10} {times}  {rest}", flush=True)


# ---- the command line ----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a hub name or a folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, not counted (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step (default: %(default)s)")
    parser.add_argument("--completions", type=int, default=8, help="completions of each prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest completion, tokens (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of AdamW, constant (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    parser.add_argument(
        "--held-out", type=int, default=100, help="held-out sums for the reward afterwards; 0: none (default: %(default)s)"
    )
    parser.add_argument("--samples", type=int, default=4, help="completions of each held-out sum (default: %(default)s)")
    parser.add_argument("--trl-rows", type=int, help="rows per TRL micro-batch, accumulated over a step; default: all rows")
    parser.add_argument(
        "--trl-bf16-weights",
        action="store_true",
        help="give TRL bfloat16 weights: faster, but small updates round to zero; with bfloat16",
    )
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0,
        metavar="SECONDS",
        help="seconds to wait before each step for an idle machine",
    )
    parser.add_argument(
        "--trl-reuse-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use Strop's malloc settings for TRL's process too (strop.learner.budget.device_memory); default: %(default)s",
    )
    parser.add_argument(
        "--same-work",
        action="store_true",
        help="no token ends a completion and rewards alternate: both sides sample --max-tokens each, and every group is trained on",
    )
    parser.add_argument(
        "--trl-malloc", action="store_true", help="TRL without Strop's malloc settings, and a third side with them"
    )
    parser.add_argument("--profile", action="store_true", help="one more step of Strop under torch.profiler")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements to this file")
    options = parser.parse_args(arguments)
    rows = options.prompts * options.completions
    if options.warmup < 1 or options.steps < 1:
        parser.error("--steps and --warmup must be at least 1: a first step pays for compiling kernels and filling caches")
    if options.completions < 2:
        parser.error("--completions must be at least 2: a group of one has no baseline")
    if options.trl_rows is not None and (options.trl_rows < 1 or rows % options.trl_rows):
        parser.error(f"--trl-rows must divide the {rows} completions of a step")
    if options.same_work:
        options.held_out = 0  # rewards that mean nothing teach nothing
    if options.trl_bf16_weights and options.dtype != "bfloat16":
        parser.error("--trl-bf16-weights needs --dtype bfloat16")
    return options


def settings_of(options: argparse.Namespace, dtype: str, model: str, folder: str) -> Settings:
    return Settings(
        model=model,
        folder=folder,
        dtype=dtype,
        threads=options.threads,
        prompts=options.prompts,
        completions=options.completions,
        max_tokens=options.max_tokens,
        warmup=options.warmup,
        steps=options.steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
        trl_rows=options.trl_rows or options.prompts * options.completions,
        trl_bf16_weights=options.trl_bf16_weights,
        trl_reuse_memory=options.trl_reuse_memory and not options.trl_malloc,
        profile=options.profile,
        same_work=options.same_work,
        trl_malloc=options.trl_malloc,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    use_threads(options.threads)
    try:
        found = versions()
    except metadata.PackageNotFoundError as error:
        print(f"error: {error.name} is not installed; pip install -e '.[bench]'", file=sys.stderr)
        return 1
    print(machine_line(found))
    results = []
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        run_in_subprocess(prepare_model, options.model, f"{folder}/model")
        for dtype in ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,):
            settings = settings_of(options, dtype, f"{folder}/model", f"{folder}/{dtype}")
            Path(settings.folder).mkdir()
            print(f"\n{options.model}, {dtype}, {settings.threads} threads")
            print(f"{settings.prompts} prompts x {settings.completions} completions of at most {settings.max_tokens} tokens")
            try:
                result = compare(settings, tasks=options.held_out, samples=options.samples, patience=options.wait_quiet)
            except SideFailed as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            results.append(replace(result, settings=replace(settings, model=options.model)))
            print("\n" + report(results[-1]), flush=True)
    if options.json is not None:
        content = {
            "versions": found,
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "results": [as_json(result) for result in results],
        }
        options.json.write_text(json.dumps(content, indent=1))
        print(f"\nall measurements are in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

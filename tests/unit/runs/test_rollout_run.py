"""From a configuration to the parts of a run."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loop.fakes import FakeLearner, Recorder
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.grpo import GRPO, Clip, GroupRelative
from strop.checkpointing.base import RunState
from strop.config import GrpoRunConfig, dump_config, load_config
from strop.data.sources.source import DataSource
from strop.environments.arithmetic import Arithmetic
from strop.environments.base import Environment, EnvironmentConfigError, reward
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.handle import LocalEnvironment
from strop.environments.remote import RemoteEnvironment, connect
from strop.learner.client import InlineCaller, ThreadCaller
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.rollouts.stream import DropTooOld, Fifo, StreamState, Windowed
from strop.runs import open_run, rollout_run
from strop.runs.backend import LocalBackend
from strop.runs.dry_run.examine import find_single_turns
from strop.runs.engines import offloads_learner
from strop.runs.lifecycle import make_checkpoints, make_tracker, resolve_metric
from strop.runs.restore import restore_checkpoint
from strop.runs.rollout_run import make_order, make_train_options
from strop.runs.run_algorithm import make_run_algorithm
from strop.runs.tasks import count_slots, describe_environments, list_reward_names, make_training_tasks, make_validation_tasks
from strop.types import Messages, Rollout, Task, user
from support.environment_servers import EnvironmentServerThread


def config(*overrides: str) -> GrpoRunConfig:
    base = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "grpo.val_period=0"]
    return load_config(None, [*base, "checkpointing.metric_name=null", *overrides], root=GrpoRunConfig).config


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("val:accuracy", "validation/accuracy"),
        ("train:reward", "train/reward"),
        ("val:easy/pass@4", "validation/easy/pass@4"),
        ("accuracy", "validation/accuracy"),
        ("timing/train/generation", "timing/train/generation"),
    ],
)
def test_metrics_are_named_as_they_are_logged(name, tag):
    assert resolve_metric(name, "validation") == tag


def test_the_loop_is_set_as_the_configuration_says():
    found = make_train_options(
        config(
            "grpo.num_prompts_per_step=6",
            "grpo.num_generations_per_prompt=4",
            "policy.train_global_batch_size=8",
            "grpo.update_epochs=2",
            "grpo.async_grpo.enabled=true",
            "grpo.async_grpo.max_trajectory_age_steps=3",
            "grpo.use_dynamic_sampling=true",
            "grpo.dynamic_sampling_max_gen_batches=5",
            "grpo.stop_at_validation_metric=accuracy",
            "grpo.stop_at_validation_threshold=0.9",
            "checkpointing.save_period=7",
        ),
        share_prefixes=False,
        filters=True,
    )
    assert (found.groups_per_step, found.steps_per_batch, found.update_epochs, found.max_staleness) == (6, 3, 2, 3)
    assert found.max_groups_per_step == 30 and found.save_period == 7 and not found.share_prefixes


async def opened(config: GrpoRunConfig, tracker: Any) -> None:
    async with open_run.open_run(config, make_run_algorithm(config), tracker):
        pass


def test_options_of_an_environment_are_checked_before_a_model_is_loaded(monkeypatch, tmp_path):
    async def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(open_run, "make_backend", load)
    tracker = SimpleNamespace(progress=lambda _: None, note=lambda _: None)
    for option in ("{max_operandd: 3}", "{max_operand: many}"):
        wrong = config(f"env.arithmetic={option}")
        with pytest.raises(EnvironmentConfigError, match="max_operand"):
            asyncio.run(opened(wrong, tracker))
    with pytest.raises(AssertionError, match="a model was loaded"):
        asyncio.run(opened(config(), tracker))


ASYNCHRONOUS = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2", "grpo.num_prompts_per_step=4")


@pytest.mark.parametrize(
    ("overrides", "order", "slots"),
    [
        ((), Fifo(), 12),
        (("order=windowed",), Windowed(window=4, groups_per_step=4, max_staleness=2), 12),
        (("order=windowed", "window=7"), Windowed(window=7, groups_per_step=4, max_staleness=2), 12),
        (("slots=9",), Fifo(), 9),
        (("order=drop_too_old", "slots=17"), DropTooOld(), 17),
        (("order=drop_too_old", "slots=17", "enabled=false"), Fifo(), 4),
        (("order=windowed", "max_trajectory_age_steps=0"), Fifo(), 4),
    ],
)
def test_the_stream_has_the_order_and_the_slots_that_the_configuration_asks_for(overrides, order, slots):
    found = config(*ASYNCHRONOUS, *(f"grpo.async_grpo.{override}" for override in overrides))
    options = make_train_options(found, share_prefixes=True)
    assert make_order(found, options) == order and count_slots(found) == slots
    assert options.drop_stale == order.drops_stale


@pytest.mark.parametrize(
    ("overrides", "before"),
    [
        (("grpo.async_grpo.enabled=false",), "never"),
        (("grpo.async_grpo.max_trajectory_age_steps=0",), "never"),
        ((), "training"),
        (("grpo.async_grpo.in_flight_weight_updates=true",), "never"),
    ],
)
def test_groups_in_flight_are_finished_before_the_learner_takes_the_module_of_an_embedded_engine(overrides, before):
    assert make_train_options(config(*ASYNCHRONOUS, *overrides), share_prefixes=True).drain_before == before


def test_groups_in_flight_of_a_separate_engine_are_finished_before_weights_are_published(monkeypatch):
    monkeypatch.setattr(rollout_run, "engine_shares_module", lambda config: False)
    assert make_train_options(config(*ASYNCHRONOUS), share_prefixes=True).drain_before == "publishing"


@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        (("policy.generation.backend=vllm",), True),
        (("policy.generation.backend=vllm", "grpo.async_grpo.enabled=false"), False),
        ((), False),
    ],
    ids=["engines beside the learner", "synchronous", "an engine on the learner's module"],
)
def test_learners_and_columns_beside_the_engines_share_one_thread(overrides, beside):
    backend = LocalBackend(config(*ASYNCHRONOUS, *overrides), SimpleNamespace(network=SimpleNamespace(packed=True)))
    callers = [backend.make_caller(FakeLearner()) for _ in range(3)]
    assert {type(caller) for caller in callers} == {ThreadCaller if beside else InlineCaller}
    assert len({id(getattr(caller, "thread", None)) for caller in callers}) == 1


def test_the_sections_of_the_configuration_are_the_fields_of_grpo():
    found = make_run_algorithm(
        config(
            "grpo.use_leave_one_out_baseline=true",
            "grpo.normalize_rewards=false",
            "loss_fn.ratio_clip_max=0.28",
            "loss_fn.token_level_loss=false",
            "loss_fn.reference_policy_kl_penalty=0.0",
            "algorithm.kwargs.objective.low=0.1",
        )
    )
    assert found == GRPO(
        advantage=GroupRelative(leave_one_out=True, normalize=False),
        objective=Clip(low=0.1, high=0.28),
        aggregation="sequence_mean",
        kl=Kl(weight=0.0),
    )


# --- tasks --------------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"problem": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(count)))
    return path


@pytest.mark.extensions
def test_what_training_holds_out_is_validated_on(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 20)
    found = config(
        f"data.train.dataset_name={rows}", "data.train.env_name=math", "env.math={}", "data.train.split_validation_size=5"
    )
    train = make_training_tasks(found)
    held_out = make_validation_tasks(found)
    assert held_out is not None and (len(train), len(held_out)) == (15, 5)
    questions = [{source.at(index)[2].question for index in range(len(source))} for source in (train, held_out)]
    assert not questions[0] & questions[1] and len(questions[0] | questions[1]) == 20


def test_several_entries_are_mixed_by_weight():
    entries = '[{"env_name": "easy", "weight": 1.0, "size": 50}, {"env_name": "hard", "weight": 3.0, "size": 50}]'
    base = ["policy.model_name=m", "grpo.val_period=0", "checkpointing.metric_name=null"]
    environments = ["env.easy.type=arithmetic", "env.hard.type=arithmetic", "env.hard.operands=3"]
    found = load_config(None, [*base, f"data.train={entries}", *environments], root=GrpoRunConfig).config
    train = make_training_tasks(found)
    names = [train.at(index)[0] for index in range(40)]
    assert names.count("hard") == 30 and train.at(names.index("hard"))[2].question.count("+") == 2


@pytest.mark.extensions
def test_a_data_sets_own_configuration_reaches_the_data(monkeypatch):
    from strop.data.sources.source import DataSource

    seen: list[DataSource] = []
    monkeypatch.setattr(DataSource, "load_rows", lambda self, **options: seen.append(self) or [])
    found = config("data.train.dataset_name=acme/sums", "data.train.subset=hard", "data.train.env_name=math", "env.math={}")
    with pytest.raises(EnvironmentConfigError, match="has no tasks"):
        make_training_tasks(found)
    assert seen[0].subset == "hard"


# --- what a run continues from ----------------------------------------------------------------------------------------------------


def saved(path: Path) -> None:
    (path / "tokenizer").write_text("")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run saved at step 4, with records up to step 6."""
    own = config(
        f"checkpointing.checkpoint_dir={tmp_path / 'results'}", f"logger.log_dir={tmp_path / 'logs'}", "logger.console=none"
    )
    tracker = make_tracker(own)
    for step in range(1, 7):
        tracker.log(step, {"train/loss": step / 2, "timing/train/generation": 1.0})
    tracker.close()
    state = StreamState(next_index=16, unfinished=(), finished=())
    logged = {"train/loss": 2.0, "validation/accuracy": 0.5}
    make_checkpoints(own, saved).save(RunState(step=4, stream=state, logged=logged), {"policy": FakeLearner(shift=0.5)})
    return own


def test_records_after_the_checkpoint_go_and_its_own_are_complete(run):
    tracker, learner = make_tracker(run), FakeLearner()
    state = restore_checkpoint(
        run, make_checkpoints(run, saved), {"policy": learner}, tracker, RolloutStore(Path(run.logger.log_dir))
    )
    tracker.close()
    assert state is not None and state.step == 4 and learner.shift == 0.5
    lines = [json.loads(line) for line in (Path(run.logger.log_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[3] == {"step": 4, "train/loss": 2.0, "timing/train/generation": 1.0, "validation/accuracy": 0.5}


def test_a_run_that_does_not_resume_sets_everything_aside(run, tmp_path):
    fresh = replace(run, checkpointing=replace(run.checkpointing, resume="never"))
    recorder, learner = Recorder(), FakeLearner()
    assert (
        restore_checkpoint(fresh, make_checkpoints(fresh, saved), {"policy": learner}, recorder, RolloutStore(tmp_path / "logs"))
        is None
    )
    assert learner.shift == 0 and len(recorder.notes) == 2
    assert (tmp_path / "results" / "previous_1" / "step_4").exists() and (
        tmp_path / "logs" / "previous_1" / "metrics.jsonl"
    ).exists()
    assert not (tmp_path / "logs" / "metrics.jsonl").exists()


OFFLOADS = {  # made-up devices: on a CPU or a GPU, with an engine on the learner's module or with weights of its own
    (): {"gpu, own": True, "gpu, shared": False, "cpu, own": False, "cpu, shared": False},
    ("policy.offload=true",): dict.fromkeys(("gpu, own", "gpu, shared", "cpu, own", "cpu, shared"), True),
    ("policy.offload=false",): dict.fromkeys(("gpu, own", "gpu, shared", "cpu, own", "cpu, shared"), False),
    ("policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"): {"gpu, own": False},
}


@pytest.mark.parametrize("overrides", OFFLOADS)
def test_a_learner_leaves_a_gpu_that_it_shares_with_an_engine_s_weights_or_where_it_is_told_to(overrides):
    for place, wanted in OFFLOADS[overrides].items():
        found = offloads_learner(config(*overrides), on_cpu="cpu" in place, shares_module="shared" in place)
        assert found == wanted, place


SUMS = ("data.train.env_name=arithmetic", "data.validation.env_name=arithmetic", "env.arithmetic={}", "policy.model_name=m")


@dataclass(frozen=True, kw_only=True)
class Calculator(Environment[Task]):
    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [Task(id="0")]

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        return (user("4"),)

    @reward()
    def right(self, task: Task, rollout: Rollout) -> float:
        return 1.0


def test_an_environment_that_answers_needs_more_than_one_turn() -> None:
    environments = {"calculator": LocalEnvironment(Calculator()), "sums": LocalEnvironment(Arithmetic())}
    (found,) = find_single_turns(environments, 1, "grpo")
    assert found.startswith("env.calculator: Calculator answers the policy (respond)")
    assert "set grpo.max_rollout_turns=N" in found
    assert not list(find_single_turns(environments, 2, "grpo")) and not list(
        find_single_turns({"sums": LocalEnvironment(Arithmetic())}, 1, "grpo")
    )


def test_tools_need_more_than_one_turn() -> None:
    def negate(number: int) -> int:
        """Change the sign."""
        return -number

    environments = {"sums": LocalEnvironment(Arithmetic(tools=negate))}
    (found,) = find_single_turns(environments, 1, "grpo")
    assert found.startswith("env.sums: Arithmetic has tools, but grpo.max_rollout_turns is 1")
    assert not list(find_single_turns(environments, 2, "grpo"))


@pytest.mark.extensions
def test_a_run_over_hosted_environments_asks_the_same_tasks_in_the_same_order(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"problem": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(30)))
    entries = (
        f'[{{"env_name": "sums", "weight": 1.0, "size": 40}}, '
        f'{{"env_name": "written", "weight": 2.0, "dataset_name": "{rows}", "split_validation_size": 8}}]'
    )
    base = ("policy.model_name=m", "grpo.val_period=0", "checkpointing.metric_name=null", f"data.train={entries}")
    environments = ("env.sums.type=arithmetic", "env.sums.max_operand=7", "env.written.type=math")
    config = load_config(None, [*base, *environments], root=GrpoRunConfig).config

    def streams(hosted: dict[str, RemoteEnvironment]) -> list[tuple[str, str, str, str]]:
        train = make_training_tasks(config, hosted)
        held_out = make_validation_tasks(config, hosted)
        assert held_out is not None
        found = [source.at(index) for source in (train, held_out) for index in range(len(source))]
        return [(name, task.id, task.question, task.answer) for name, _, task in found]

    made = describe_environments(config)
    assert {alias: (own.name, len(own.sources)) for alias, own in made.items()} == {
        "sums": ("arithmetic", 1),
        "written": ("math", 2),
    }
    hosts = {alias: EnvironmentServerThread(pickle.loads(pickle.dumps(own))) for alias, own in made.items()}
    try:
        hosted = {alias: connect(host.description, [host.transport]) for alias, host in hosts.items()}
        assert streams(hosted) == streams({})
    finally:
        for host in hosts.values():
            host.close()


def correct(task: Task, rollout: Rollout) -> bool:
    return task.answer in rollout.text


def test_a_reward_without_a_type_is_an_environment_of_functions(tmp_path: Path) -> None:
    """Named in the configuration, or given as functions from Python with rows in memory."""
    (tmp_path / "mine.py").write_text("def correct(task, rollout):\n    return True\n")
    overrides = ("policy.model_name=m", f"env.mine.reward={tmp_path}/mine.py:correct", "data.train.size=2")
    config = load_config(None, overrides, root=GrpoRunConfig, check=False).config
    entry = config.data.train[0].with_rows([{"prompt": f"{n}+1", "answer": n + 1} for n in range(3)])
    for env in (config.env, {"mine": EnvironmentConfig(type=None, rewards={"correct": {"function": correct, "weight": 2.0}})}):
        given = replace(config, env=env, data=replace(config.data, train=(entry,), shuffle=False))
        name, environment, task = make_training_tasks(given).at(1)
        assert name == "mine" and isinstance(environment.environment, FunctionEnvironment)
        assert (task.question, task.answer) == ("1+1", "2")
        assert list_reward_names(given) == ("correct",)
    saved = dump_config(replace(config, env=env))
    assert f"function: {correct.__module__}:correct" in saved and "rows" not in saved

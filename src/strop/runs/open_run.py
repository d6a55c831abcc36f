"""Open a run from its configuration: assemble its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strop.algorithms.base import Algorithm
from strop.config import TrainingRunConfig
from strop.distributed.base import Cluster
from strop.environments.resources import open_resources
from strop.monitoring.trackers.base import Tracker
from strop.runs.backend import make_backend, make_columns
from strop.runs.lifecycle import begin_run, finish_at_end, make_early_stop
from strop.runs.monitors.run_listeners import RunSetup, attach_listeners, make_listeners, make_store
from strop.runs.restore import measure_asleep, restore_run, resume_run
from strop.runs.rollout_run import find_source
from strop.trainer.run import TrainingRun


@asynccontextmanager
async def open_run(
    config: TrainingRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None = None
) -> AsyncIterator[TrainingRun]:
    """Open a run in this process or on ``cluster``, restored from its newest checkpoint if there is one."""
    config = begin_run(config, algorithm, tracker, cluster)
    source = find_source(config).read(config, algorithm, tracker, cluster)  # a fault in the data before a model is loaded
    async with open_resources(source.environments, tracker.note, tracker.progress):
        setup = RunSetup(config=config, algorithm=algorithm, source=source, store=make_store(config), cluster=cluster)
        attached = attach_listeners(setup)
        backend = await make_backend(config, cluster, tracker)
        options = source.prepare(backend)
        learners = await backend.build_learners(algorithm, source.sampling, options.count_optimizer_steps(source.size))
        columns = await make_columns(
            config, backend, algorithm, learners, tracker, await source.make_columns(backend), lambda: run.last_metrics
        )
        setup.store.decode = backend.bundle.tokenizer.decode
        restored = await restore_run(config, backend.bundle, learners, source.make_parts(backend), setup.store, tracker)
        async with source.open(backend, learners["policy"], columns, restored.state) as supply:
            run = TrainingRun(
                options=options,
                algorithm=algorithm,
                stream=supply.stream,
                learners=learners,
                parts=restored.parts,
                columns=columns,
                weights=measure_asleep(config, supply.weights, learners, restored.parts, tracker),
                tracker=tracker,
                evaluator=supply.evaluator,
                early_stop=make_early_stop(config),
                checkpoints=restored.checkpoints,
                listeners=make_listeners(setup, attached),
            )
            resume_run(run, restored.state)
            async with finish_at_end(run):
                yield run

"""Reporting of a run: a console, metric and rollout files, and external services.

    train --log(step, metrics)---> CompositeTracker --+--> live | plain console
                                                      +--> metrics.jsonl        read by `strop plot`
                                                      +--> services of `strop.trackers`
    train --write(step, records)-> RolloutStore --> rollouts/step_000012.parquet

Each heavy library is imported by exactly one module here; `strop.monitoring.trackers.base` imports none of them.
"""

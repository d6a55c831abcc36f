"""What a run tells the world: a console for the person, files for the record, services for the team.

    loop --log(step, metrics)--> Trackers --+--> live | plain console
                                            +--> metrics.jsonl        the record; `strop plot` reads it
                                            +--> TensorBoard, Weights & Biases
    loop --write(step, records)-> RolloutStore --> rollouts/step_000012.parquet

Each heavy library is imported by one module here and by nothing else; `strop.tracking.base` imports none of them.
"""

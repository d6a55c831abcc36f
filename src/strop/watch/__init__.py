"""Who waits for whom, for how long, and who says so when it takes too long.

    with waiting("training loop", on="generation"):          waits.py     an open wait, a few microseconds
        with waiting("generation", on="group 87"):
            with waiting("sample 3", on="environment 'sandbox', turn 2", kind="environment"):
                ...
    Watchdog, a thread -- every few seconds --+--> a wait over its limit is named, with its whole chain     watchdog.py
                                              +--> <log folder>/status.json                                 status.py
    strop doctor RUN  <-- status.json, metrics.jsonl                                                        doctor.py

``strop.watch.waits`` needs the standard library only: whatever can hang may import it.
"""

"""The watchdog: track open waits, report those that exceed their limit, and diagnose runs.

    with waiting("training loop", on="generation"):          waits.py     register an open wait; costs a few microseconds
        with waiting("generation", on="group 87"):
            with waiting("sample 3", on="environment 'sandbox', turn 2", kind="environment"):
                ...
    Watchdog, a thread -- every few seconds --+--> report each wait over its limit, with its whole chain    watchdog.py
                                              +--> <log folder>/status.json                                 status.py
    strop doctor RUN  <-- status.json, metrics.jsonl                                                        doctor.py

The waits module imports only the standard library, so that any module can use it.
"""

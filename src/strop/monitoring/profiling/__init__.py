"""Profiles of single steps: the activity of every process on one time line, as a trace for Perfetto.

span_recorder.py    keeps the spans of this process while a step is recorded; costs one comparison while none is
process_profile.py  records one process, with torch's operators and kernels where asked for
step_profiler.py    the driver: begins and ends recording everywhere, sets the clocks and writes the file
"""

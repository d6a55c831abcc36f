"""Profiles of single steps: the activity of every process on one time line, as a trace for Perfetto.

span_recorder.py keeps the spans of this process while a step is recorded; costs one comparison otherwise
clock_exchange.py  offset of another process's clock from ours, with an error bound
operator_trace.py  torch's operators and kernels of this process, optional
trace_file.py      spans of all processes as a Chrome trace
step_profiler.py   the driver: begins and ends recording everywhere, and writes the file
"""

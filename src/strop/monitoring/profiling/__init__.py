"""Profiles of single steps: what every process did and when, on one time line, as a trace that Perfetto opens.

span_recorder.py   keeps the spans of this process while a step is recorded; costs one comparison while none is
clock_exchange.py  how far the clock of another process is from ours, and how far that may be off
operator_trace.py  torch's operators and kernels of this process, optional
trace_file.py      spans of all processes as a Chrome trace
step_profiler.py   the driver: begins and ends recording everywhere, and writes the file
"""

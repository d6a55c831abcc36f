"""Rooflines: how near the operators of a recorded step are to what the device can do, by arithmetic and by memory.

device_ceilings.py    the peaks of a device: of a table, measured, or given
measured_ceilings.py  this machine's processors, measured in about a second and remembered
"""

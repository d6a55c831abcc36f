"""Rooflines of a made-up step: a driver that multiplies, sums and decodes, and an engine that was not recorded."""

from __future__ import annotations

from strop.monitoring.roofline.device_ceilings import DeviceCeilings
from strop.monitoring.roofline.operator_rows import OperatorRow
from strop.monitoring.roofline.step_roofline import PassTotals, ProcessRoofline, StepRoofline

CEILINGS = DeviceCeilings(
    device="P", flops={"bfloat16": 200e9, "float32": 100e9}, bandwidth=10e9, cache_bandwidth=40e9, source="made up"
)
PRODUCT = OperatorRow("forward", "matrix products", "aten::mm", "[8, 8] x [8, 8]", "float32", 4, 2.0, 150e9, 1e9, True)
SUM = OperatorRow("forward", "reductions", "aten::sum", "", "float32", 2, 1.0, 1e9, 4e9, True)
VIEWS = OperatorRow("forward", "views and dispatch", "views and dispatch", "", "", 9, 0.5, 0, 0, False)
PYTHON = OperatorRow("forward", "outside operators", "outside operators", "", "", 1, 0.25, 0, 0, False)
FORWARD = PassTotals(name="forward", calls=1, seconds=3.75, flops=151e9, moved=5e9, precision="float32")
DECODE = PassTotals(name="decode", calls=10, seconds=0.5, flops=0, moved=0, precision="", sequences=40, attended=4000)
DRIVER = ProcessRoofline(name="driver", ceilings=CEILINGS, passes=(FORWARD, DECODE), rows=(PRODUCT, SUM, VIEWS, PYTHON))
STEP = StepRoofline(
    step=3, seconds=5.0, processes=(DRIVER, ProcessRoofline(name="engine-0", note="not recorded: it was started during the step"))
)

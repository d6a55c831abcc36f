"""All machines of a run: the driver's own, and the other nodes, which are queried in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from strop.monitoring.machine.machine_monitor import MachineMonitor

logger = logging.getLogger(__name__)

Ask = Callable[[], Mapping[str, float]]  # a node's measurements since the last query; may take long, or raise


class SystemMonitor:
    """``metrics`` returns ``system/node_0/cpu_percent`` and similar: means since the last call. It never blocks."""

    def __init__(
        self,
        own: MachineMonitor | None,
        others: Mapping[int, Ask] | None = None,
        *,
        interval: float = 10.0,
        gpu_names: Sequence[str] = (),
    ) -> None:
        """``own``: node 0. ``others``: other nodes by number, queried every ``interval`` seconds."""
        self.gpu_names = tuple(gpu_names)  # of a node that has GPUs, by NVML
        self._own, self._others, self._interval = own, dict(others or {}), interval
        self._lock = threading.Lock()
        self._reports: dict[int, list[Mapping[str, float]]] = {}
        self._stopped = threading.Event()
        for node in self._others:  # so that a hanging node does not delay the others
            threading.Thread(target=self._ask, args=(node,), name=f"node-monitor-{node}", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the machines since the last call; nothing for a machine that was not sampled since."""
        found = {} if self._own is None else {f"system/node_0/{name}": value for name, value in self._own.drain().items()}
        with self._lock:
            reports, self._reports = self._reports, {}
        for node, each in reports.items():
            for name in sorted({name for report in each for name in report}):
                values = [report[name] for report in each if name in report]
                found[f"system/node_{node}/{name}"] = sum(values) / len(values)
        return found

    def stop(self) -> None:
        self._stopped.set()
        if self._own is not None:
            self._own.stop()

    def _ask(self, node: int) -> None:
        while not self._stopped.wait(self._interval):
            try:
                report = self._others[node]()
            except Exception as error:
                if not self._stopped.is_set():
                    logger.warning("node %d is no longer monitored: %s: %s", node, type(error).__name__, error)
                return
            if report:
                with self._lock:
                    self._reports.setdefault(node, []).append(report)

"""The store through which the ranks of a process group find each other."""

from __future__ import annotations

import datetime
import socket
from typing import Any


def serve_store(host: str, world: int, timeout: float) -> Any:
    """Serve a TCPStore on ``host``, this node's cluster address. The store's own listener would be on every interface."""
    import torch.distributed

    distributed: Any = torch.distributed
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=max(128, world))
    limit, port = datetime.timedelta(seconds=timeout), listener.getsockname()[1]
    return distributed.TCPStore(
        host, port, world, True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )

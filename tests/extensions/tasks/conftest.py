"""Episodes of scripted policies, in sandboxes of this machine."""

from __future__ import annotations

from support.agent_tasks import play as play

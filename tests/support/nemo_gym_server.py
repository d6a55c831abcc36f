"""Serves a resource server of NeMo-Gym as its package has it, without NeMo-Gym's head server: ``nemo_gym_server.py NAME PORT``.

Run by the interpreter that has nemo-gym. It asks for Python 3.13.14 and runs on older ones where that is ignored.
"""

# ruff: noqa: I001, F401
import anthropic
import hydra  # before nemo_gym, which changes the order of sys.path
import openai
import pydot
import yappi

import importlib
import inspect
import sys
from typing import Any
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import ServerClient


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[2])
    module = importlib.import_module(f"resources_servers.{name}.app")

    def own(base: Any) -> Any:
        kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, base)]
        return next((kind for kind in kinds if kind.__module__ == module.__name__), base)

    config = own(BaseResourcesServerConfig)(host="127.0.0.1", port=port, entrypoint="app.py", name=name, domain="agent")
    server = own(SimpleResourcesServer)(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()

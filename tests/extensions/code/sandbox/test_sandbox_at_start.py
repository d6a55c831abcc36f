"""A sandbox that cannot be had is told before a model is loaded, and where programs run is said."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import asdict

import pytest

from strop.base_config import validate_section
from strop.config import GrpoRunConfig, load_config
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.resources import configure_resources, open_resources
from strop.extensions.code.grade_code import CHECKER, COMPILER
from strop.extensions.code.sandbox.base import Program, SandboxError
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox, try_sandbox
from strop.extensions.code.sandbox.sandbox_server import CEILINGS
from strop.problems import ConfigError
from strop.runs.dry_run.examine import examine


@pytest.fixture
def configured():
    yield lambda **options: configure_resources({"sandbox": validate_section(SandboxConfig, options)})
    configure_resources({})


def test_what_runs_programs_of_the_policy_says_so():
    named = {
        name: make_environment(name, options)
        for name, options in {
            "code": {},
            "code_interpreter": {},
            "math": {},
            "arithmetic": {"tools": ["calculator", "python"]},
        }.items()
    }
    needing = {name: LocalEnvironment(environment).traits.needed_resources for name, environment in named.items()}
    assert needing == {"code": ("sandbox",), "code_interpreter": ("sandbox",), "math": (), "arithmetic": ("sandbox",)}


def test_a_run_says_where_programs_run(configured):
    configured(level="limits", workers=1)
    assert asyncio.run(try_sandbox()).endswith("sandbox.level=limits: they can do what this run can")


@pytest.mark.parametrize("env", ["env.arithmetic.tools=[python]", "env.arithmetic={type: code_interpreter}"])
def test_without_bubblewrap_a_dry_run_says_what_to_install(env, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["policy.model_name=org/model", "data.train.env_name=arithmetic", env]
    config = load_config(None, words, root=GrpoRunConfig).config
    with pytest.raises(ConfigError, match=r"sandbox.level.* needs bubblewrap.*apt-get install bubblewrap"):
        examine(config)
    there = load_config(None, [*words, "sandbox.url=http://127.0.0.1:1"], root=GrpoRunConfig).config
    examine(there)


def test_a_service_without_its_key_is_an_error_at_start(configured, monkeypatch):
    monkeypatch.delenv("STROP_SANDBOX_API_KEY", raising=False)
    configured(url="http://127.0.0.1:1")
    with pytest.raises(SandboxError, match="set the environment variable STROP_SANDBOX_API_KEY"):
        asyncio.run(try_sandbox())


@pytest.mark.parametrize("limits", [CHECKER, COMPILER])
def test_a_service_allows_what_graders_of_code_ask_for(limits):
    most = asdict(CEILINGS)
    assert not {name: value for name, value in asdict(limits).items() if value > most[name]}


def test_a_port_that_is_taken_is_named(monkeypatch, capsys):
    from strop.extensions.code.sandbox.sandbox_command import sandbox

    monkeypatch.setenv("STROP_SANDBOX_API_KEY", "key")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert sandbox(["serve", "--level", "limits", "--port", str(port)], "strop sandbox serve") == 1
    assert (
        f"127.0.0.1:{port} cannot be listened on: Address already in use; set another --host or --port" in capsys.readouterr().err
    )


def test_a_sandbox_is_closed_with_the_run_that_opened_it(configured):
    async def use() -> None:
        environments = [LocalEnvironment(make_environment(name)) for name in ("code", "math", "code_interpreter")]
        said: list[str] = []
        async with open_resources(environments, said.append, said.append):
            sandbox = get_sandbox()
            assert said == ["trying the sandbox", "programs of the policy run in the sandbox of this machine, sandbox.level=limits"
                            ": they can do what this run can"]  # fmt: skip
        with pytest.raises((SandboxError, RuntimeError)):
            await sandbox.run(Program(source="print(1)"))
        assert get_sandbox() is not sandbox
        assert (await get_sandbox().run(Program(source="print(1)"))).stdout == "1\n"

    configured(level="limits", workers=1)
    asyncio.run(use())


def test_nothing_is_opened_for_environments_that_need_nothing(configured, monkeypatch):
    async def use() -> None:
        async with open_resources([LocalEnvironment(make_environment("math"))], pytest.fail):
            pass

    monkeypatch.setattr("strop.extensions.code.sandbox.sandbox_pool.try_sandbox", lambda: 1 / 0)
    asyncio.run(use())

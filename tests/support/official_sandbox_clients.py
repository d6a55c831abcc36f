"""What E2B's and Daytona's own client packages do where Strop does the same: ``python THIS e2b URL``, in an environment that has them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

LABELS = {"strop-sandbox": "host", "strop-sandbox-owner": "owner"}


async def e2b(url: str) -> list[Any]:
    from e2b import AsyncSandbox

    account = {"api_key": "e2b_" + "0" * 40, "api_url": url}
    network: Any = {"allow_out": ["a.b"], "deny_out": ["0.0.0.0/0"]}
    box = await AsyncSandbox.create(
        "box:1",
        timeout=3600,
        metadata=LABELS,
        envs={"A": "b"},
        allow_internet_access=True,
        network=network,
        sandbox_url=url,
        **account,
    )
    running = await box.commands.run("cat; echo err >&2", background=True, stdin=True, user="root")
    await running.send_stdin("data")
    await running.close_stdin()
    result = await running.wait()
    kept = await box.create_snapshot(mode="filesystem")
    await AsyncSandbox.delete_snapshot(kept.snapshot_id, **account)
    listed = await AsyncSandbox.list(**account).next_items()
    await box.kill()
    return [result.exit_code, result.stdout, result.stderr, len(listed)]


async def daytona(url: str) -> list[Any]:
    from daytona import AsyncDaytona, CreateSandboxFromImageParams, DaytonaConfig, Resources, SessionExecuteRequest

    said: list[str] = []
    async with AsyncDaytona(DaytonaConfig(api_key="k3y", api_url=f"{url}/api", target="us")) as client:
        limits = Resources(cpu=1, memory=2, disk=1)
        life = {"auto_stop_interval": 0, "auto_delete_interval": 0, "ttl_minutes": 60}
        network: dict[str, Any] = {"network_block_all": True, "domain_allow_list": "a.b"}
        made = CreateSandboxFromImageParams(
            image="box:1", env_vars={"A": "b"}, labels=LABELS, resources=limits, **life, **network
        )
        box = await client.create(made)
        await box.process.create_session("s")
        request = SessionExecuteRequest(command="echo out; echo err >&2", run_async=True, suppress_input_echo=True)
        command = await box.process.execute_session_command("s", request)
        await box.process.get_session_command_logs_async("s", command.cmd_id, said.append, said.append)
        await box.process.delete_session("s")
        await box.fs.upload_file(b"\0data", "/tmp/file")
        data = await box.fs._api_client.download_file("/tmp/file")
        await box.fs.delete_file("/tmp/file")
        await box.create_snapshot("kept")
        await client.snapshot.delete(await client.snapshot.get("kept"))
        await anext(aiter(client.list()))
        await client.delete(box)
    return [sorted(said), data]


if __name__ == "__main__":
    print(asyncio.run({"e2b": e2b, "daytona": daytona}[sys.argv[1]](sys.argv[2])))

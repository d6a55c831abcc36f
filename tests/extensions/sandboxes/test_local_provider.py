"""Bubblewrap over an image: what the conformance suite does not look at."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from extensions.code.sandbox.hostile_programs import FILES, KERNEL, NETWORK
from strop.extensions.sandboxes.base import (
    FailureCause,
    NetworkPolicy,
    Resources,
    Sandbox,
    SandboxCommand,
    SandboxFailure,
    SandboxSpec,
)
from strop.extensions.sandboxes.local import local_provider
from strop.extensions.sandboxes.local.bubblewrap import find_parents
from strop.extensions.sandboxes.local.egress_proxy import EgressProxy
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from support.each import each
from support.oci_images import entry, folder, link, make_layer, programs_layer, python_layer, write_layout

MakeLocal = Callable[[], LocalProvider]


def use(provider: LocalProvider, spec: SandboxSpec, work: Callable[[Sandbox], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            return await work(await provider.create(spec))
        finally:
            await provider.close()

    return asyncio.run(run())


def shell(provider: LocalProvider, spec: SandboxSpec, *scripts: str, **options: Any) -> list[str]:
    async def work(sandbox: Sandbox) -> list[str]:
        return [(await sandbox.exec(SandboxCommand(argv=("sh", "-c", script), **options))).text.strip() for script in scripts]

    return use(provider, spec, work)


def test_the_images_settings_and_users_hold(make_local: MakeLocal, tmp_path: Path):
    image = write_layout(tmp_path, [programs_layer()], {"User": "ann:team", "WorkingDir": "/made/here"})
    provider = make_local()
    many = provider.many_users
    spec = SandboxSpec(image=image, environment={"COLOUR": "red", "MORE": "1"})
    said = shell(provider, spec, "id", "pwd", "echo $COLOUR $MORE $HOME", "ls -ld /home/ann")
    assert said[1] == "/made/here" or not many
    assert said[2] == ("red 1 /home/ann" if many else "red 1 /root")
    if many:
        assert said[0].startswith("uid=1000(ann) gid=2000(team)") and " ann " in said[3]


ATTACKS = {
    "mount": "mount -t tmpfs none /mnt",
    "make a device": "mknod /disk b 254 0",
    "read the memory of the first process": "dd if=/proc/1/mem of=/dev/null bs=1 count=1",
    "enter the root of the first process": "ls /proc/1/root/",
    "open a descriptor of the first process": "for n in 0 1 2 3 4 5 6 7 8 9; do cat < /proc/1/fd/$n && exit 0; done; false",
    "read the environment of the first process": "cat /proc/1/environ",
    "kill the first process": "kill -9 1; sleep 0.1; echo still here; false",
    "change the kernel": "echo 1 > /proc/sys/kernel/panic",
    "reboot by sysrq": "echo b > /proc/sysrq-trigger",
    "read the kernel's messages": "head -c 1 /proc/kmsg",
    "become the user that prepared the sandbox": "chmod 644 /etc/passwd; ls /layers /state /image /sandbox_init.py",
}


@each("attack", ATTACKS, ids=list(ATTACKS))
def test_root_of_an_image_is_not_root(make_local: MakeLocal, image: str, attack: str):
    async def work(sandbox: Sandbox) -> None:
        result = await sandbox.exec(SandboxCommand(argv=("sh", "-c", ATTACKS[attack]), wall_s=20))
        assert not result.succeeded, result
        assert (await sandbox.health()).answers

    use(make_local(), SandboxSpec(image=image), work)


# What the sandbox of programs refuses, and an image may do: the files, users, processes and loopback that it sees are its own.
OWN = {
    "changes its personality", "sends a datagram", "listens", "reads the users of the machine", "writes into the root folder",
    "writes beside the interpreter", "lists its parent's files", "writes its own memory", "becomes root",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_escapes_from_no_sandbox_of_programs_does_not_escape_from_an_image_as_its_root(
    make_local: MakeLocal, tmp_path: Path
):
    image = write_layout(tmp_path, [programs_layer(), python_layer()])
    programs = [each for each in (*KERNEL, *NETWORK, *FILES) if each.language == "python"]
    names = {"PORT": "22", "SECRET": repr(str(tmp_path / "index.json"))}

    async def work(sandbox: Sandbox) -> set[str]:
        escaped = set()
        for program in programs:
            source = re.sub("PORT|SECRET", lambda match: names[match[0]], program.source)
            result = await sandbox.exec(SandboxCommand(argv=("/python/bin/python3", "-c", source), cwd="/tmp"))
            assert b"ESCAPED" in result.stdout or program.says.encode() in result.stdout, (program.name, result)
            escaped |= {program.name} if b"ESCAPED" in result.stdout else set()
        assert (await sandbox.health()).answers
        return escaped

    assert use(make_local(), SandboxSpec(image=image), work) == OWN and len(programs) + len(ATTACKS) - len(OWN) >= 60


@pytest.mark.parametrize("what", ["dev", "proc"])
def test_an_image_whose_folders_are_links_leads_nowhere(make_local: MakeLocal, tmp_path: Path, what: str):
    image = write_layout(
        tmp_path, [programs_layer(), make_layer([link(what, "/usr"), link("etc/hosts", "/proc/sys/kernel/hostname")])]
    )
    said = shell(make_local(), SandboxSpec(image=image), f"ls -ld /{what}; ls /usr 2>&1", "true")
    assert said[0].startswith("d")


def test_a_killed_sandbox_is_lost_and_gone(make_local: MakeLocal, image: str):
    async def work(sandbox: Any) -> None:
        running = asyncio.ensure_future(sandbox.exec(SandboxCommand(argv=("sleep", "60"))))
        await asyncio.sleep(0.2)
        signal.pidfd_send_signal(sandbox._started.child_handle, signal.SIGKILL)
        with pytest.raises(SandboxFailure, match="ended from outside") as found:
            await running
        assert found.value.cause == FailureCause.LOST and found.value.ending == "sandbox"

    use(make_local(), SandboxSpec(image=image), work)


def test_memory_is_bounded_without_control_groups(make_local: MakeLocal, image: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_provider, "make_cgroup", lambda: None)

    async def work(sandbox: Sandbox) -> str:
        result = await sandbox.exec(SandboxCommand(argv=("sh", "-c", "dd if=/dev/zero bs=300M count=1 | sleep 5"), wall_s=20))
        return result.reason

    assert use(make_local(), SandboxSpec(image=image, resources=Resources(memory_mb=100)), work) == "memory"


def test_without_overlayfs_layers_are_copied(make_local: MakeLocal, tmp_path: Path):
    """The copy is a function of the first process, which a machine without overlayfs needs; here it is called by itself."""
    from strop.extensions.sandboxes.local.sandbox_init import copy_layer

    lower = [
        folder("d"),
        entry("d/old", b"1"),
        entry("gone", b"1"),
        folder("kept"),
        entry("kept/a", b"a", mode=0o700),
        link("l", "gone"),
    ]
    upper = [
        folder("d"),
        entry("d/.wh..wh..opq", b""),
        entry("d/new", b""),
        entry(".wh.gone", b""),
        entry("kept/b", b""),
        entry("l", b"x"),
    ]
    provider = make_local()
    image = provider.store.get(write_layout(tmp_path / "image", [make_layer(lower), make_layer(upper)]))
    (tmp_path / "root").mkdir()
    for layer in image.layers:
        copy_layer(str(layer), str(tmp_path / "root"))
    found = {str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*")}
    assert found == {"d", "d/new", "kept", "kept/a", "kept/b", "l"} and (tmp_path / "root/l").read_text() == "x"
    assert (tmp_path / "root/kept/a").stat().st_mode & 0o777 == 0o700


# --- network ------------------------------------------------------------------------------------------------------------------


@each("hosts, host, port, named", [
    (("a.b",), "a.b", 443, True), (("a.b",), "A.B.", 443, True), (("a.b",), "x.a.b", 443, False), (("*.a.b",), "x.a.b", 443, True),
    (("*.a.b",), "a.b", 443, False), (("*.a.b",), "xa.b", 443, False), (("a.b:80",), "a.b", 443, False), (("a.b:80",), "a.b", 80, True),
])  # fmt: skip
def test_a_policy_names_hosts(hosts, host, port, named):
    assert EgressProxy(NetworkPolicy(egress="allow", hosts=hosts)).names(host, port) == named


def test_only_what_the_policy_names_is_reached_and_only_through_the_proxy(make_local: MakeLocal, tmp_path: Path):
    """The commands are of this machine's Python, bound into no image: a client of a few lines in the shell's place."""

    async def run() -> list[str]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello" if line else b"")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = []
        for network in (
            NetworkPolicy(egress="allow", hosts=(f"127.0.0.1:{port}",)),
            NetworkPolicy(egress="allow", hosts=("127.0.0.1",)),
            NetworkPolicy(egress="all"),
            NetworkPolicy(egress="allow", hosts=("other.example",)),
        ):
            proxy = await asyncio.start_server(EgressProxy(network).serve, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
            writer.write(f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\n\r\n".encode())
            found.append((await reader.read()).decode())
            writer.close()
            proxy.close()
        server.close()
        return found

    allowed, without_port, everywhere, other = asyncio.run(run())
    assert allowed.endswith("hello")
    for refused in (without_port, everywhere):
        assert refused.startswith("HTTP/1.1 403") and "of this machine or a private network" in refused
    assert "does not name 127.0.0.1" in other


def test_a_sandbox_reaches_its_proxy_and_forwarded_ports_and_nothing_else(make_local: MakeLocal, image: str):
    async def work(sandbox: Any) -> None:
        assert sandbox._started.ports == [3128, 8123]
        said = await sandbox.exec(SandboxCommand(argv=("sh", "-c", "cat /proc/net/tcp; env")))
        listening = {int(line.split()[1].partition(":")[2], 16) for line in said.stdout.decode().splitlines() if " 0A " in line}
        assert listening == {3128, 8123} and b"HTTPS_PROXY=http://127.0.0.1:3128" in said.stdout

    use(make_local(), SandboxSpec(image=image, network=NetworkPolicy(egress="all", forward=(8123,))), work)


# --- kills --------------------------------------------------------------------------------------------------------------------

RUN = """
import asyncio, json, sys
from strop.extensions.sandboxes.base import SandboxCommand, SandboxSpec, NetworkPolicy
from strop.extensions.sandboxes.local.local_provider import LocalOptions, LocalProvider

async def main():
    provider = LocalProvider(LocalOptions(folder=sys.argv[1]))
    async def one(number):
        while True:
            sandbox = await provider.create(SandboxSpec(image=sys.argv[2], network=NetworkPolicy(egress="all")))
            print("open", flush=True)
            script = "(setsid sleep 4217 &); head -c 1000000 /dev/zero > /file; sleep 0.3; exit 0"
            await sandbox.exec(SandboxCommand(argv=("sh", "-c", script)))
            await sandbox.destroy()
    await asyncio.gather(*(one(number) for number in range(3)))

asyncio.run(main())
"""


def list_left(mark: str) -> list[str]:
    """Processes whose command line has a mark: all of a sandbox, and its command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in line or line == b"sleep\x004217\x00":
            found.append(line.decode("utf-8", "replace")[:200])
    return found


def kill_runs(provider: LocalProvider, image: str, kills: int) -> None:
    """Kill runs at random moments, and wait until nothing of them is left."""
    chance = random.Random(7)
    for number in range(kills):
        command = [sys.executable, "-c", RUN, str(provider.store.folder), image]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert run.stdout is not None
        if chance.random() < 0.8:
            run.stdout.readline()
        time.sleep(chance.random() * 0.5)
        mounts = Path("/proc/self/mounts").read_text()
        run.send_signal(signal.SIGKILL if number % 2 == 0 else signal.SIGTERM)
        run.wait()
        run.stdout.close()
        layer = str(provider.store.folder)
        deadline = time.monotonic() + 20
        while (left := [*list_left(layer), *list_groups(run.pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"kill {number}: {left}"
        assert Path("/proc/self/mounts").read_text() == mounts


def list_groups(process: int) -> list[str]:
    parents = find_parents()
    folders = {parents.memory, parents.pids} if parents else ()
    return [str(group) for parent in folders for group in parent.glob(f"strop_sandbox_{process}_*")]


@pytest.mark.slow
def test_nothing_is_left_of_killed_runs(make_local: MakeLocal, image: str):
    provider = make_local()
    provider.store.get(image).release()
    kill_runs(provider, image, 5)


@pytest.mark.exhaustive
def test_nothing_is_left_after_a_hundred_kills(make_local: MakeLocal, image: str):
    provider = make_local()
    provider.store.get(image).release()
    kill_runs(provider, image, 100)


def test_closing_leaves_no_descriptor_process_or_group(make_local: MakeLocal, image: str):
    others = set(list_groups(os.getpid()))  # of sandboxes that earlier tests of this process keep

    async def run() -> None:
        provider = make_local()
        spec = SandboxSpec(image=image, network=NetworkPolicy(egress="all"))
        before = 1 << 20
        for round_number in range(3):
            for sandbox in [await provider.create(spec) for _ in range(2)]:
                await sandbox.exec(SandboxCommand(argv=("true",)))
                await sandbox.destroy()
            assert round_number == 0 or len(os.listdir("/proc/self/fd")) <= before
            before = len(os.listdir("/proc/self/fd"))
        await provider.close()

    asyncio.run(run())
    assert set(list_groups(os.getpid())) <= others

"""Images: their layers, their cache, and what a hostile one tries."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure
from strop.extensions.sandboxes.images import layers as layers_module
from strop.extensions.sandboxes.images import sources
from strop.extensions.sandboxes.images.layers import LayerLimits, Owners, Unpacked, unpack_layer
from strop.extensions.sandboxes.images.store import ImageStore, UnpackedImage
from support.oci_images import Entry, entry, folder, link, make_layer, write_docker_archive, write_layout

LIMITS = LayerLimits(total_mb=1, entries=100)


def unpack(folder: Path, *given: list[Entry] | bytes, limits: LayerLimits = LIMITS) -> list[Path]:
    """Unpack layers on top of each other. Return their folders, the lowest first."""
    found: list[Path] = []
    done = Unpacked(limits)
    for number, layer in enumerate(given):
        blob = layer if isinstance(layer, bytes) else make_layer(layer)
        unpack_layer(io.BytesIO(blob), folder / str(number), found[::-1], Owners(), done)
        found.append(folder / str(number))
    return found


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def is_whiteout(path: Path) -> bool:
    found = os.lstat(path)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def is_opaque(path: Path) -> bool:
    return "user.overlay.opaque" in os.listxattr(path)


def test_a_layer_keeps_modes_times_links_and_users(tmp_path):
    given = [
        folder("bin", mode=0o750, mtime=11),
        entry("bin/tool", b"x" * 5000, mode=0o711, mtime=7),
        link("bin/sh", "tool"),
        link("bin/other", "bin/tool", tarfile.LNKTYPE),
        folder("tmp", mode=0o1777),
    ]
    (layer,) = unpack(tmp_path, given)
    tool = os.lstat(layer / "bin/tool")
    assert (stat.S_IMODE(tool.st_mode), tool.st_mtime, tool.st_size, tool.st_nlink) == (0o711, 7, 5000, 2)
    assert os.readlink(layer / "bin/sh") == "tool" and os.lstat(layer / "bin").st_mtime == 11
    assert stat.S_IMODE(os.lstat(layer / "bin").st_mode) == 0o750 and stat.S_IMODE(os.lstat(layer / "tmp").st_mode) == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_users_of_an_image_are_no_users_of_the_machine(tmp_path):
    blob = make_layer([entry("a", b"", uid=5, gid=6), entry("b", b"", uid=1 << 20)])
    unpack_layer(io.BytesIO(blob), tmp_path / "0", (), Owners(base=1000000), Unpacked(LIMITS))
    assert (os.lstat(tmp_path / "0/a").st_uid, os.lstat(tmp_path / "0/a").st_gid) == (1000005, 1000006)
    assert os.lstat(tmp_path / "0/b").st_uid == 1000000 + 65534


def test_a_whiteout_hides_what_is_below_and_nothing_of_its_own_layer(tmp_path):
    lower = [folder("d"), entry("d/old", b"1"), entry("gone", b"1"), entry("kept", b"1")]
    upper = [entry(".wh.gone", b""), entry(".wh.never", b""), entry("kept", b"2"), entry(".wh.kept", b"")]
    _, layer = unpack(tmp_path, lower, upper)
    assert is_whiteout(layer / "gone") and list_files(layer) == {"gone", "kept"} and (layer / "kept").read_bytes() == b"2"


@pytest.mark.parametrize(
    "upper",
    [
        [folder("d"), entry("d/.wh..wh..opq", b""), entry("d/new", b"")],
        [entry("d/new", b""), entry("d/.wh..wh..opq", b"")],
        [entry(".wh.d", b""), folder("d"), entry("d/new", b"")],
        [folder("d"), entry("d/new", b""), entry(".wh.d", b"")],
    ],
    ids=["marked, then filled", "filled, then marked", "removed and made again", "made again and removed"],
)
def test_an_opaque_folder_hides_what_is_below_it(tmp_path, upper):
    _, layer = unpack(tmp_path, [folder("d"), entry("d/old", b"1")], upper)
    assert list_files(layer) == {"d", "d/new"} and is_opaque(layer / "d")


def test_a_path_through_a_link_of_a_lower_layer_ends_where_the_link_leads(tmp_path):
    lower = [folder("usr"), folder("usr/lib", mode=0o711), link("lib", "usr/lib"), link("up", "../../usr")]
    _, layer = unpack(tmp_path, lower, [entry("lib/a", b""), entry("up/lib/b", b"")])
    assert list_files(layer) == {"usr", "usr/lib", "usr/lib/a", "usr/lib/b"}
    assert stat.S_IMODE(os.lstat(layer / "usr/lib").st_mode) == 0o711


def test_what_a_whiteout_hid_is_not_followed_in_the_layer_above(tmp_path):
    *_, top = unpack(tmp_path, [folder("usr"), link("lib", "usr")], [entry(".wh.lib", b"")], [entry("lib/a", b"")])
    assert list_files(top) == {"lib", "lib/a"}


# --- escapes: none of them leaves the folder, or changes what a program may do ------------------------------------------------

OUTSIDE = "outside"  # a folder next to the layer's own, with a file `secret`


def write_outside(entries: list[Entry]) -> Callable[[Path], None]:
    """An attack that would change or show a file outside of the layer."""

    def attack(folder: Path) -> None:
        (folder / OUTSIDE).mkdir()
        (folder / OUTSIDE / "secret").write_text("untouched")
        (folder / OUTSIDE / "secret").chmod(0o600)
        try:
            found = unpack(folder, entries)
        except SandboxFailure as error:
            assert error.cause == FailureCause.IMAGE
        else:
            inside = [path.lstat().st_ino for path in found[0].rglob("*")]
            assert os.stat(folder / OUTSIDE / "secret").st_ino not in inside
        assert list_files(folder / OUTSIDE) == {"secret"} and (folder / OUTSIDE / "secret").read_text() == "untouched"
        assert stat.S_IMODE((folder / OUTSIDE / "secret").stat().st_mode) == 0o600

    return attack


def refuse(blob: Callable[[], bytes], match: str, limits: LayerLimits = LIMITS) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        with pytest.raises(SandboxFailure, match=match) as found:
            unpack(folder, blob(), limits=limits)
        assert found.value.cause == FailureCause.IMAGE and found.value.ending == "broken_task"

    return attack


def keep_harmless(entries: list[Entry], check: Callable[[Path], bool]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (layer,) = unpack(folder, entries)
        assert check(layer)

    return attack


def _huge_header() -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    return info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024


def _long_name() -> bytes:
    return make_layer([entry("a" * 300, b"")])


def _cut_gzip() -> bytes:
    return gzip.compress(make_layer([entry("a", os.urandom(4000))]))[:-300]


DEEP = "/".join("d" * 10 for _ in range(300))
UP = "../" * 12
ESCAPES: dict[str, Callable[[Path], None]] = {
    "a path that goes up": write_outside([entry(f"../{OUTSIDE}/secret", b"changed")]),
    "a path that goes up later": write_outside([folder("a"), entry(f"a/../../{OUTSIDE}/secret", b"changed")]),
    "an absolute path": write_outside([entry("/outside/secret", b"changed")]),
    "a link up, and a file through it": write_outside([link("a", f"../{OUTSIDE}"), entry("a/secret", b"changed")]),
    "an absolute link, and a file through it": write_outside([link("a", "/"), entry("a/outside/secret", b"changed")]),
    "links that lead through each other": write_outside([link("a", ".."), link("b", f"a/../{OUTSIDE}"), entry("b/secret", b"changed")]),
    "a link as a file, written over": write_outside([link("a", f"../{OUTSIDE}/secret"), entry("a", b"changed")]),
    "a link as a file, its mode changed": write_outside([link("a", f"../{OUTSIDE}/secret"), entry("a", b"", mode=0o777)]),
    "a link as a folder, its mode changed": write_outside([link("a", f"../{OUTSIDE}"), folder("a", mode=0o777)]),
    "a hard link to a file outside": write_outside([link("a", f"../{OUTSIDE}/secret", tarfile.LNKTYPE), entry("a", b"changed")]),
    "a hard link through a link": write_outside([link("d", f"../{OUTSIDE}"), link("a", "d/secret", tarfile.LNKTYPE)]),
    "a whiteout of a file outside": write_outside([link("d", f"../{OUTSIDE}"), entry("d/.wh.secret", b"")]),
    "a whiteout that goes up": refuse(lambda: make_layer([entry("a/.wh...", b"")]), "names no file"),
    "a whiteout of nothing": refuse(lambda: make_layer([entry("a/.wh.", b"")]), "names no file"),
    "an opaque mark outside": write_outside([link("d", f"../{OUTSIDE}"), entry("d/.wh..wh..opq", b"")]),
    "setuid and setgid": keep_harmless(
        [entry("su", b"x", mode=0o6755), folder("d", mode=0o2755)],
        lambda layer: not (os.lstat(layer / "su").st_mode | os.lstat(layer / "d").st_mode) & 0o6000,
    ),
    "devices": keep_harmless(
        [entry("disk", type=tarfile.BLKTYPE, devmajor=254), entry("mem", type=tarfile.CHRTYPE, devmajor=1, devminor=1)],
        lambda layer: list_files(layer) == set(),
    ),
    "overlayfs' own whiteout": keep_harmless(
        [entry("a", type=tarfile.CHRTYPE, devmajor=0, devminor=0)], lambda layer: list_files(layer) == set()
    ),
    "extended attributes": keep_harmless(
        [entry("a", b"x", pax_headers={"SCHILY.xattr.security.capability": "x", "SCHILY.xattr.user.overlay.redirect": "/"})],
        lambda layer: os.listxattr(layer / "a") == [],
    ),
    "a bomb of zeros": refuse(lambda: gzip.compress(make_layer([entry("a", bytes(3 << 20))])), "larger than 1 MB"),
    "a bomb of files": refuse(lambda: make_layer([entry(f"a{number}", b"") for number in range(200)]), "or 100 files"),
    "a bomb of a header": refuse(_huge_header, "a header of 8589934592 bytes"),
    "a bomb of folders": refuse(lambda: make_layer([entry(DEEP, b"")]), "deeper than 256"),
    "a name that no file has": refuse(_long_name, "a name over 255 bytes"),
    "links in a circle": refuse(lambda: make_layer([link("a", "b"), link("b", "a"), entry("a/x", b"")]), "too many links"),
    "links that grow": refuse(lambda: make_layer([link("a", "a/a/a/a/a/a/a"), entry("a/x", b"")]), "too many links"),
    "a hard link to a folder": refuse(lambda: make_layer([folder("d"), link("a", "d", tarfile.LNKTYPE)]), "no file of its layer"),
    "a hard link to nothing": refuse(lambda: make_layer([link("a", "/", tarfile.LNKTYPE)]), "leads nowhere"),
    "a stream that ends early": refuse(_cut_gzip, "damaged"),
    "no archive at all": refuse(lambda: b"nonsense" * 300, "damaged"),
    "a compression that is not known": refuse(lambda: b"BZh91AY" + bytes(600), "not known"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ESCAPES.values(), ids=list(ESCAPES))
def test_an_image_cannot_escape(tmp_path, attack):
    attack(tmp_path)


# --- sources and the cache ----------------------------------------------------------------------------------------------------


def make_store(path: Path, limit_mb: int = 1000, total_mb: int = 50) -> ImageStore:
    return ImageStore(path / "cache", limit_mb=limit_mb, limits=LayerLimits(total_mb=total_mb), owners=Owners())


def read_image(image: UnpackedImage, name: str) -> bytes:
    return next((path / name).read_bytes() for path in reversed(image.layers) if (path / name).exists())


BASE = make_layer([folder("etc"), entry("etc/name", b"base")])
TOP = make_layer([entry("etc/name", b"top")])


@pytest.mark.parametrize("compress", [False, True])
def test_an_oci_layout_is_read_as_a_folder_and_as_an_archive(tmp_path, compress):
    reference = write_layout(tmp_path / "layout", [BASE, TOP], {"User": "ann"}, tag="v1", compress=compress)
    with tarfile.open(tmp_path / "layout.tar", "w") as archive:
        archive.add(tmp_path / "layout", ".")
    store = make_store(tmp_path)
    for each_reference in (reference, f"oci-archive:{tmp_path}/layout.tar"):
        image = store.get(each_reference)
        assert (
            read_image(image, "etc/name") == b"top"
            and image.config.user == "ann"
            and image.config.environment["COLOUR"] == "blue"
        )


def test_an_archive_of_docker_save_is_read(tmp_path):
    image = make_store(tmp_path).get(write_docker_archive(tmp_path / "box.tar", [BASE, TOP]))
    assert read_image(image, "etc/name") == b"top" and image.config.workdir == "/work"


@pytest.mark.parametrize(
    "reference, match",
    [
        ("python:3.12", "names no registry"),
        ("oci:/nowhere/at/all", "there is no /nowhere"),
        ("LAYOUT:other", "0 images that other may mean"),
        ("snapshot:abc", "there is no snapshot:abc"),
    ],
)
def test_a_reference_that_leads_nowhere_is_the_tasks_fault(tmp_path, reference, match):
    write_layout(tmp_path / "layout", [BASE])
    with pytest.raises(SandboxFailure, match=match) as found:
        make_store(tmp_path).get(reference.replace("LAYOUT", f"oci:{tmp_path}/layout"))
    assert found.value.cause == FailureCause.IMAGE


def test_a_damaged_blob_is_not_unpacked(tmp_path):
    reference = write_layout(tmp_path / "layout", [BASE])
    blob = max((tmp_path / "layout/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes().replace(b"base", b"evil"))
    with pytest.raises(SandboxFailure, match="damaged") as found:
        make_store(tmp_path).get(reference)
    assert found.value.cause == FailureCause.REGISTRY and list((tmp_path / "cache/new").iterdir()) == []


def test_names_in_a_manifest_do_not_lead_out_of_the_layout(tmp_path):
    (tmp_path / "layout/blobs").mkdir(parents=True)
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "layout/index.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(SandboxFailure, match="leads out"):
        make_store(tmp_path).get(f"oci:{tmp_path}/layout")
    (tmp_path / "layout/index.json").unlink()
    (tmp_path / "layout/manifest.json").write_text(json.dumps([{"Config": "../secret.json", "RepoTags": [], "Layers": ["x"]}]))
    with pytest.raises(SandboxFailure, match=r"outside of itself|no valid|different layers|not valid"):
        make_store(tmp_path).get(f"oci:{tmp_path}/layout")


def test_images_share_layers_and_the_cache_keeps_its_bound_but_for_what_is_in_use(tmp_path):
    store = make_store(tmp_path, limit_mb=4)
    layers = [make_layer([entry("big", os.urandom(2 << 20))]) for _ in range(4)]
    references = [write_layout(tmp_path / str(number), [BASE, layer]) for number, layer in enumerate(layers)]
    held = store.get(references[0])
    others = [store.get(reference) for reference in references[1:3]]
    assert len({image.layers[0] for image in (held, *others)}) == 1
    for image in others:
        image.release()
    store.get(references[3]).release()
    assert (held.layers[1] / "big").exists() and not (others[0].layers[1] / "big").exists()
    kept = {path.parent.parent.name for path in (tmp_path / "cache/layers").glob("*/fs/big")}
    assert len(kept) == 2, "the one in use, and the newest"
    assert (store.get(references[1]).layers[1] / "big").exists(), "it is unpacked again"


def test_a_folder_that_a_killed_run_was_writing_is_removed(tmp_path):
    store = make_store(tmp_path)
    left, own = store.folder / "new" / "4194304-abc", store.folder / "new" / f"{os.getpid()}-abc"
    for path in (left, own):
        (path / "fs").mkdir(parents=True)
    make_store(tmp_path)
    assert not left.exists() and own.exists()


def test_a_layer_that_fills_the_disk_is_the_providers_fault(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layers_module.os, "symlink", full)
    with pytest.raises(SandboxFailure, match="no space is left") as found:
        unpack(tmp_path, [link("a", "b")])
    assert found.value.cause == FailureCause.DISK


def test_the_image_of_this_machine_is_the_same_in_whatever_order_its_libraries_are_found(monkeypatch):
    libraries = sorted(sources.find_libraries([Path("/bin/ls").resolve()]))
    monkeypatch.setattr(sources, "collect_python", dict)
    digests = set()
    for found in (libraries, libraries[::-1]):
        monkeypatch.setattr(sources, "find_libraries", lambda programs, found=found: found)
        digests |= {layer.digest for layer in sources.MachineSource().read_manifest().layers}
    assert len(libraries) > 1 and len(digests) == 1

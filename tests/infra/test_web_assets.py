"""The dashboard's libraries: what the lock names and nothing else, from the cache where they are there."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILES = {"dist/one.min.js": b"one()", "LICENSE": b"do what you like", "dist/other.js": b"never taken"}


@pytest.fixture
def web_assets(on_setup_path: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return importlib.import_module("web_assets")


def archive(path: Path, files: dict[str, bytes] = FILES) -> bytes:
    with tarfile.open(path, "w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("package/dist/link.js")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    return path.read_bytes()


def lock_of(data: bytes) -> dict[str, Any]:
    return {
        "packages": [
            {
                "name": "one",
                "version": "1.0.0",
                "integrity": "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode(),
                "files": [
                    {"from": name, "to": target, "sha256": hashlib.sha256(FILES[name]).hexdigest()}
                    for name, target in (("dist/one.min.js", "one.min.js"), ("LICENSE", "one.LICENSE.txt"))
                ],
            }
        ]
    }


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose lock names one package, and a client that packs it."""
    root = tmp_path / "clone"
    (root / "infra/lock").mkdir(parents=True)
    (root / "service/spark_service/dashboard").mkdir(parents=True)
    data = archive(tmp_path / "one-1.0.0.tgz")
    (root / "infra/lock/web-assets.json").write_text(json.dumps(lock_of(data)))
    client = tmp_path / "bin/npm"
    client.parent.mkdir()
    client.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/asked\n'
        f'while [ "$1" != --pack-destination ]; do shift; done; cp {tmp_path}/one-1.0.0.tgz "$2"\n'
    )
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return root


def place(web_assets: ModuleType, clone: Path, client: Path | None) -> bool:
    environment = {"PATH": "/usr/bin:/bin" if client is None else f"{client}:/usr/bin:/bin"}
    with Path(os.devnull).open() as nothing:
        assets = web_assets.WebAssets(clone)
        return bool(web_assets.place_if_possible(assets, Path("/nowhere/python"), environment, nothing.fileno()))


def test_named_files_are_taken_once(web_assets: ModuleType, clone: Path, tmp_path: Path) -> None:
    vendor = clone / web_assets.PLACE
    assert not web_assets.WebAssets(clone).in_place()
    assert place(web_assets, clone, tmp_path / "bin")
    assert {path.name: path.read_bytes() for path in vendor.iterdir()} == {
        "one.min.js": b"one()",
        "one.LICENSE.txt": b"do what you like",
    }
    assert web_assets.WebAssets(clone).in_place()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("pack one@1.0.0 ")
    assert "--ignore-scripts" in asked
    # Again, with what git may have left: from the cache, without a client.
    (vendor / "one.min.js").write_bytes(b"changed")
    (vendor / "older.js").touch()
    assert not web_assets.WebAssets(clone).in_place()
    (tmp_path / "bin/npm").unlink()
    assert place(web_assets, clone, tmp_path / "bin")
    assert sorted(path.name for path in vendor.iterdir()) == ["one.LICENSE.txt", "one.min.js"]
    assert (vendor / "one.min.js").read_bytes() == b"one()"
    assert (tmp_path / "asked").read_text() == asked


@pytest.mark.parametrize("change", ["archive", "file", "missing"])
def test_what_differs_from_the_lock_is_not_taken(
    web_assets: ModuleType, clone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    path = clone / "infra/lock/web-assets.json"
    lock = json.loads(path.read_text())
    if change == "archive":
        archive(tmp_path / "one-1.0.0.tgz", {**FILES, "dist/one.min.js": b"two()"})
    elif change == "file":
        lock["packages"][0]["files"][0]["sha256"] = "0" * 64
    else:
        lock["packages"][0]["files"][0]["from"] = "dist/link.js"
    path.write_text(json.dumps(lock))
    assert not place(web_assets, clone, tmp_path / "bin")
    assert not (clone / web_assets.PLACE).exists()
    told = capfd.readouterr().err
    assert "could not be fetched" in told
    assert "plain tables" in told
    assert "expected" in told


def test_without_a_network_the_setup_goes_on(
    web_assets: ModuleType, clone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin/npm").write_text("#!/bin/sh\necho 'npm error code ENOTFOUND'\nexit 1\n")
    assert not place(web_assets, clone, tmp_path / "bin")
    told = capfd.readouterr().err
    assert "ENOTFOUND" in told
    assert "plain tables" in told


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"packages": [{"name": "x"}]}'])
def test_a_damaged_lock_is_named(web_assets: ModuleType, console: ModuleType, text: str) -> None:
    with pytest.raises(console.SetupError, match=r"web-assets\.json cannot be read"):
        web_assets.parse_lock(text)


def test_the_lock_names_what_pages_load(web_assets: ModuleType, root: Path) -> None:
    packages = web_assets.parse_lock((root / web_assets.LOCK).read_text())
    names = {file.name for package in packages for file in package.files}
    layout = (root / "service/spark_service/dashboard/templates/layout.html").read_text()
    for name in names:
        assert f'"{name}"' in layout or name.endswith(".LICENSE.txt")
    # Whose code is taken, that one's licence is, too.
    assert all(any("LICENSE" in file.name for file in package.files) for package in packages)


def test_pages_work_without_the_libraries() -> None:
    """Whatever is vendored is asked for before it is used."""
    root = Path(__file__).resolve().parents[2]
    for template in (root / "service/spark_service/dashboard/templates").glob("*.html"):
        text = template.read_text()
        for name in ("htmx.min.js", "uPlot.min.css", "uPlot.iife.min.js"):
            assert text.count(f'has_asset("{name}")') >= (f'"{name}")' in text.replace(f'has_asset("{name}")', ""))

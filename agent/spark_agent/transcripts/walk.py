"""Which files a path stands for."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from spark_agent.transcripts.model import Limits, Skipped

__all__ = ["walk"]


_SIDE_FOLDERS = frozenset({"tool-results", "workflows"})
"""Of Claude Code, in a folder named as the session beside it: outputs that the session quotes."""
_MEMORY = "memory"
_INDEX_NAMES = frozenset({"sessions-index.json", "session_index.jsonl", "history.jsonl", ".aider.input.history"})


def walk(path: Path, limits: Limits) -> Iterator[Path | Skipped]:
    """Give the files under ``path`` in sorted order, and what is left out. A path that is a file gives itself."""
    try:
        # The person named this path: following it is what they asked for.
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        yield Skipped(path, f"found nothing to read ({_reason(error)}), expected a file or a folder")
        return
    if not _is_folder(root):
        yield root
        return
    files = 0
    # A stack, not recursion: the depth of the tree is not ours.
    waiting = [root]
    while waiting:
        here = waiting.pop()
        if _is_folder(here):
            entries = _listing(here, is_root=here == root)
            if isinstance(entries, Skipped):
                yield entries
            else:
                waiting.extend(reversed(entries))
            continue
        left_out = _left_out(here, root)
        if left_out is not None:
            yield left_out
            continue
        files += 1
        if files > limits.max_files:
            yield Skipped(
                root, f"found more than {limits.max_files:,} files, expected at most that many; the rest is unread"
            )
            return
        yield here


def _listing(folder: Path, *, is_root: bool) -> list[Path] | Skipped:
    if folder.name.startswith(".") and not is_root:
        return Skipped(folder, "a hidden folder; name it itself to read it")
    if (
        not is_root
        and folder.name in _SIDE_FOLDERS
        and folder.parent.with_name(f"{folder.parent.name}.jsonl").is_file()
    ):
        return Skipped(folder, "side files of a session that is read itself")
    if not is_root and folder.name == _MEMORY and _beside_sessions(folder):
        return Skipped(folder, "what a tool remembers of a project, and no session; name it itself to read it")
    try:
        return sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        return Skipped(folder, f"the folder can not be read: {_reason(error)}")


def _beside_sessions(folder: Path) -> bool:
    """Whether Claude Code's sessions, or Qwen Code's folder of them, stand beside a folder."""
    try:
        return any(entry.suffix == ".jsonl" or entry.name == "chats" for entry in folder.parent.iterdir())
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        # Opening it will say why.
        return False


def _left_out(entry: Path, root: Path) -> Skipped | None:
    if entry.name in _INDEX_NAMES or entry.name.endswith(".meta.json"):
        return Skipped(entry, "an index of sessions, or about one, and none itself")
    try:
        if not stat.S_ISLNK(entry.lstat().st_mode):
            return None
        target = entry.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        return Skipped(entry, f"leads nowhere: {_reason(error)}")
    if target.is_relative_to(root):
        return Skipped(entry, "a symbolic link to something that is read under its own name")
    return Skipped(entry, "a symbolic link that leaves the folder; name its target itself to read it")


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return (strerror or str(error) or type(error).__name__).lower()

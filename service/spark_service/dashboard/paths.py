"""Which paths are pages. Pure."""

from __future__ import annotations

__all__ = [
    "AUDIT",
    "LOGIN",
    "LOGOUT",
    "PRIVACY",
    "STATIC",
    "TOKENS",
    "is_admin_page",
    "is_free",
    "is_page",
    "is_twin",
    "safe_next",
]

LOGIN = "/login"
LOGOUT = "/logout"
STATIC = "/static"
PRIVACY = "/privacy"
AUDIT = f"{PRIVACY}/audit"
TOKENS = f"{PRIVACY}/tokens"
_TWIN = ".json"
_TEAM = frozenset({"/", "/.json"})
_PAGES = frozenset({"index", "budget", "compare", "login", "logout", "privacy", "profiles", "static"})
"""First segments. The team's page is the root, and its twin ``/index.json``, or ``/.json``."""


def is_page(path: str) -> bool:
    """Whether a path belongs to the dashboard: pages, their ``.json`` twins, what they load."""
    return path in _TEAM or (path.startswith("/") and path.split("/", 2)[1].removesuffix(_TWIN) in _PAGES)


def is_admin_page(path: str) -> bool:
    """Pages that show what administrators alone may see."""
    return path.removesuffix(_TWIN) in (AUDIT, TOKENS)


def is_twin(path: str) -> bool:
    """Whether a page is wanted as JSON."""
    return path.endswith(_TWIN)


def is_free(path: str) -> bool:
    """What a browser needs before anybody has logged in: it says nothing about anybody's sessions."""
    return path == LOGIN or path.startswith(f"{STATIC}/")


def safe_next(path: str) -> str:
    """Where to go after the login: a page of ours, the team's for anything else."""
    # A path alone, and one that no browser takes for a host's name ("//host", "/\\host").
    local = path.startswith("/") and not path.startswith(("//", "/\\"))
    usable = local and path.isprintable() and is_page(path.partition("?")[0]) and not path.startswith((LOGIN, LOGOUT))
    return path if usable else "/"

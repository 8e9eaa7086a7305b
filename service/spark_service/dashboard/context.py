"""What the dashboard's pages are made from."""

from __future__ import annotations

from dataclasses import dataclass

from spark_service.catalog import Catalog
from spark_service.credentials import Credentials
from spark_service.dashboard.assets import Assets
from spark_service.dashboard.figures import Figures
from spark_service.dashboard.forms import FormGuard
from spark_service.dashboard.logins import Logins
from spark_service.dashboard.refreshed import Refreshed
from spark_service.dashboard.render import Renderer
from spark_service.db.store import Store
from spark_service.keyring import Keyring

__all__ = ["Dashboard", "Rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the service was told about privacy, for people to read; zeros are what its settings mean by them."""

    min_sessions: int = 1
    window_days: int = 0
    half_life_days: int = 0
    retention_days: int = 0
    segment_after_days: int | None = None
    """``None`` where nobody moves old histograms into files."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One service's store, profiles and tokens, and what makes pages of them."""

    store: Store
    catalog: Catalog
    keyring: Keyring
    credentials: Credentials
    logins: Logins
    renderer: Renderer
    guard: FormGuard
    assets: Assets
    refreshed: Refreshed
    rules: Rules
    figures: Figures
    open_access: bool

    @classmethod
    def of(
        cls,
        store: Store,
        catalog: Catalog,
        keyring: Keyring,
        credentials: Credentials,
        rules: Rules,
        *,
        open_access: bool,
    ) -> Dashboard:
        """Read the assets and templates. :meth:`close` ends what works in the background."""
        assets, guard = Assets(), FormGuard()
        renderer = Renderer(assets, guard)
        logins, refreshed = Logins(credentials), Refreshed(store)
        figures = Figures(store, catalog, refreshed)
        return cls(
            store,
            catalog,
            keyring,
            credentials,
            logins,
            renderer,
            guard,
            assets,
            refreshed,
            rules,
            figures,
            open_access,
        )

    def close(self) -> None:
        """Before the store is closed."""
        self.refreshed.close()

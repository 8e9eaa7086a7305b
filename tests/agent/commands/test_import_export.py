from __future__ import annotations

from spark_agent.commands.import_export import _EXPORTED, _IMPORTED
from spark_agent.formats.exports import EXPORTERS
from spark_agent.formats.registry import IMPORTERS


def test_help_names_every_format() -> None:
    """The command line must not load the formats, so it names them by itself."""
    assert sorted(_IMPORTED.split(", ")) == sorted(IMPORTERS)
    assert sorted(_EXPORTED.split(", ")) == sorted(EXPORTERS)

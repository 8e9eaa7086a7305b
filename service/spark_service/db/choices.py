"""What there is to choose from: models and their workloads. Functions of a cursor."""

from __future__ import annotations

import duckdb

from spark_schemas.model import ModelShape

__all__ = ["shapes_by_use", "workloads_by_use"]


def shapes_by_use(cursor: duckdb.DuckDBPyConnection) -> list[ModelShape]:
    """Models that have sessions, those with the most parts first."""
    rows = cursor.execute(
        "SELECT shape_json FROM models JOIN (SELECT fingerprint, count(*) AS n FROM parts GROUP BY fingerprint) "
        "USING (fingerprint) ORDER BY n DESC, fingerprint"
    ).fetchall()
    return [ModelShape.model_validate_json(row[0]) for row in rows]


def workloads_by_use(cursor: duckdb.DuckDBPyConnection, fingerprint: str) -> list[str]:
    """Workloads of a model, those with the most parts first."""
    rows = cursor.execute(
        "SELECT workload FROM parts WHERE fingerprint = ? GROUP BY workload ORDER BY count(*) DESC, workload",
        [fingerprint],
    ).fetchall()
    return [row[0] for row in rows]

"""Profiles as the service builds them, without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_schemas.profile import Profile
from spark_service.builders import Inputs, build_profile


@pytest.fixture(scope="session")
def built(make: Any) -> Callable[..., Profile]:
    """Build the profile of a workload, or of a mix, of all of some sessions."""

    def build(sessions: list[Any], workload: str = "code", phase: str = "decode", shape: Any = None) -> Profile:
        shape = shape or make.shape()
        parts: dict[str, list[Any]] = {}
        for part in make.parts(shape, sessions, phase):
            parts.setdefault(part.workload, []).append(part)
        found = build_profile(shape, workload, phase, "0" * 64, Inputs.of_parts(shape, workload, parts))
        assert found is not None
        return found.profile

    return build

from __future__ import annotations

import pytest

from spark_agent.errors import UsageError
from spark_agent.workload_name import check_workload_name


@pytest.mark.parametrize("name", ["a", "code-heavy", "2nd", "a" * 63])
def test_names_pass(name: str) -> None:
    assert check_workload_name(name) == name


@pytest.mark.parametrize("name", ["", "Code", "a_b", "-a", "a-", "a" * 64, "a\n", "../a"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--name: found .*, expected 1 to 63"):
        check_workload_name(name, option="--name")

from __future__ import annotations

import pytest

from spark_agent.errors import UsageError
from spark_agent.workload_name import check_profile_name, check_workload_name


@pytest.mark.parametrize("name", ["a", "code-heavy", "2nd", "a" * 63])
def test_names_pass(name: str) -> None:
    assert check_workload_name(name) == name


@pytest.mark.parametrize("name", ["", "Code", "a_b", "-a", "a-", "a" * 64, "a\n", "../a", "a:1", "a+b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--name: found .*, expected 1 to 63"):
        check_workload_name(name, option="--name")


@pytest.mark.parametrize(("name", "canonical"), [("chat", "chat"), ("code:7+chat:3", "chat:3+code:7"), ("a:9", "a")])
def test_mixes_get_their_canonical_name(name: str, canonical: str) -> None:
    assert check_profile_name(name) == canonical


@pytest.mark.parametrize("name", ["", "Code", "a+", "a:0+b", "a+a", "../a", "a+../b", "a:1001+b"])
def test_what_is_no_mix_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--name: found .*, expected ") as caught:
        check_profile_name(name, option="--name")
    assert "code-heavy:7+chat:3" in str(caught.value.hint)

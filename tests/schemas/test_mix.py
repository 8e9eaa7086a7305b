from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from spark_schemas.histogram import SessionHistogram
from spark_schemas.ids import WORKLOAD_PATTERN
from spark_schemas.mix import MAX_WEIGHT, MAX_WORKLOADS, MIX_PATTERN, Mix, MixError, ProfileName

NAMES = st.from_regex(WORKLOAD_PATTERN, fullmatch=True)
WEIGHTS = st.integers(1, MAX_WEIGHT)
MIXES = st.dictionaries(NAMES, WEIGHTS, min_size=1, max_size=MAX_WORKLOADS)
PROFILE_NAME: TypeAdapter[str] = TypeAdapter(ProfileName)


@pytest.mark.parametrize(
    ("spelt", "canonical"),
    [
        ("code-heavy", "code-heavy"),
        ("code-heavy:7+chat:3", "chat:3+code-heavy:7"),
        ("chat:3+code-heavy:7", "chat:3+code-heavy:7"),
        ("code-heavy+chat", "chat:1+code-heavy:1"),
        ("b:1000+a:500", "a:1+b:2"),
        ("c:6+b:9+a", "a:1+b:9+c:6"),
        ("code:7", "code"),
    ],
)
def test_spellings(spelt: str, canonical: str) -> None:
    assert str(Mix.parse(spelt)) == canonical
    assert PROFILE_NAME.validate_python(canonical) == canonical


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "''"),
        ("+", "''"),
        ("a+", "''"),
        ("a++b", "''"),
        ("a:", "'a:'"),
        (":1", "':1'"),
        ("a:0+b", "'a:0'"),
        ("a:01+b", "'a:01'"),
        ("a:-1+b", "'a:-1'"),
        ("a:1.5+b", "'a:1.5'"),
        ("a:1001+b", "'a:1001'"),
        ("a:1:2+b", "'a:1:2'"),
        ("a:٣+b", "'a:٣'"),
        ("A+b", "'A'"),
        ("a +b", "'a '"),
        ("a b", "'a b'"),
        ("a\n", "'a\\n'"),
        ("../a", "'../a'"),
        ("a" * 64, repr("a" * 64)),
        ("a+b:2+a:3", "a twice"),
        ("+".join("abcdefghi"), "9 workloads"),
    ],
)
def test_what_is_no_mix(text: str, found: str) -> None:
    with pytest.raises(MixError) as caught:
        Mix.parse(text)
    assert caught.value.found == found
    assert caught.value.expected
    assert str(caught.value) == f"found {found}, expected {caught.value.expected}"
    with pytest.raises(ValidationError):
        PROFILE_NAME.validate_python(text)


@given(weights=MIXES, data=st.data())
def test_every_spelling_means_the_same(weights: dict[str, int], data: st.DataObject) -> None:
    """In any order, with all weights times a number, and without those that are 1."""
    mix = Mix.parse("+".join(f"{name}:{weight}" for name, weight in weights.items()))
    factor = data.draw(st.integers(1, MAX_WEIGHT // max(weights.values())))
    order = data.draw(st.permutations(sorted(weights)))
    parts = []
    for name in order:
        weight = weights[name] * factor
        plain = weight == 1 and data.draw(st.booleans())
        parts.append(name if plain else f"{name}:{weight}")
    spelt = "+".join(parts)
    assert re.fullmatch(MIX_PATTERN, spelt)
    assert Mix.parse(spelt) == mix
    assert list(mix.names) == sorted(weights)
    assert math.gcd(*(weight for _, weight in mix.members)) == 1
    first = min(weights)
    assert all(weight * weights[first] == weights[name] * mix.members[0][1] for name, weight in mix.members)


@given(weights=MIXES)
def test_the_canonical_spelling_is_the_only_one_that_is_a_name(weights: dict[str, int]) -> None:
    spelt = "+".join(f"{name}:{weight}" for name, weight in weights.items())
    canonical = str(Mix.parse(spelt))
    assert Mix.parse(canonical) == Mix.parse(spelt)
    assert str(Mix.parse(canonical)) == canonical
    assert PROFILE_NAME.validate_python(canonical) == canonical
    if spelt != canonical:
        with pytest.raises(ValidationError):
            PROFILE_NAME.validate_python(spelt)


@given(name=NAMES, weight=WEIGHTS)
def test_a_mix_of_one_is_that_workload(name: str, weight: int) -> None:
    assert str(Mix.parse(f"{name}:{weight}")) == str(Mix.parse(name)) == name
    assert Mix.parse(name).members == ((name, 1),)


@given(text=st.text("ab:+019-A \n", max_size=12))
def test_the_pattern_and_the_reader_agree(text: str) -> None:
    """Whatever is read matches, and what matches is read unless a name is there twice."""
    names = [part.partition(":")[0] for part in text.split("+")]
    if re.fullmatch(MIX_PATTERN, text) and len(set(names)) == len(names):
        assert set(Mix.parse(text).names) == set(names)
    else:
        with pytest.raises(MixError):
            Mix.parse(text)


def test_uploads_name_one_workload() -> None:
    for mix in ("chat:1+code:1", "chat+code", "code:1"):
        with pytest.raises(ValidationError) as caught:
            SessionHistogram.model_validate({"workload": mix})
        assert ("workload",) in [error["loc"] for error in caught.value.errors()]
    with pytest.raises(ValidationError) as caught:
        SessionHistogram.model_validate({"workload": "code"})
    assert ("workload",) not in [error["loc"] for error in caught.value.errors()]

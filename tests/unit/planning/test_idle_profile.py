"""Idle profiles: where their spans lie, and the sentences of their refusals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.profile import IdleProfile, IdleSpan, load_profile

VALID: dict[str, Any] = {
    "iteration_s": 10.0,
    "spans": [{"mean_s": 1.0}, {"mean_s": 3.0, "std_s": 0.1}],
    "bandwidth_bytes_per_s": 1e9,
    "copy_bytes_per_s": 2e9,
    "shard_bytes": 1000,
    "free_device_bytes": 0,
}


def written(folder: Path, text: str) -> Path:
    path = folder / "profile.json"
    path.write_text(text)
    return path


def test_a_profile_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, json.dumps(VALID)))
    assert profile.spans == (IdleSpan(mean_s=1.0), IdleSpan(mean_s=3.0, std_s=0.1))
    assert (profile.buffer_bytes, profile.num_parts) == (128 << 20, 4)
    assert load_profile(written(tmp_path, profile.model_dump_json())) == profile


def test_spans_without_starts_have_equal_busy_times_around_them() -> None:
    assert IdleProfile.model_validate(VALID).starts_s == (2.0, 5.0)


def test_given_starts_are_kept() -> None:
    spans = [{"mean_s": 1.0, "start_s": 0.0}, {"mean_s": 3.0, "start_s": 7.0}]
    assert IdleProfile.model_validate(VALID | {"spans": spans}).starts_s == (0.0, 7.0)


@given(spans_s=st.lists(st.floats(0, 100), max_size=20), busy_s=st.floats(0.001, 100))
def test_spans_lie_within_the_iteration_without_overlap(spans_s: list[float], busy_s: float) -> None:
    iteration_s = sum(spans_s) + busy_s
    profile = IdleProfile.model_validate(
        VALID | {"iteration_s": iteration_s, "spans": [{"mean_s": span_s} for span_s in spans_s]}
    )
    windows = [(0.0, 0.0), *zip(profile.starts_s, profile.spans_s, strict=True), (iteration_s, 0.0)]
    for (start_s, length_s), (next_s, _) in pairwise(windows):
        assert start_s + length_s <= next_s + 1e-9 * iteration_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"iteration_s": 0}, "iteration_s: Input should be greater than 0"),
        ({"iteration_s": 3.0}, "the spans add up to 4 s, but iteration_s is 3"),
        ({"spans": [{"mean_s": -1}]}, "spans.0.mean_s: Input should be greater than or equal to 0"),
        ({"spans": [{"mean_s": 1, "start_s": 1}, {"mean_s": 1}]}, "1 of 2 spans have a start_s: give it to all"),
        (
            {"spans": [{"mean_s": 2, "start_s": 1}, {"mean_s": 1, "start_s": 2}]},
            "spans.1 starts at 2 s, before spans.0 ends at 3 s",
        ),
        ({"spans": [{"mean_s": 2, "start_s": 9}]}, "the last span ends at 11 s, but iteration_s is 10"),
        ({"num_parts": 8, "buffer_bytes": 7}, "buffer_bytes is 7, too small for num_parts 8"),
        ({"slack": 1.5}, "slack: Input should be less than or equal to 1"),
        ({"shard_bytes": "many"}, "shard_bytes: Input should be a valid integer"),
        ({"bandwidth": 1}, "bandwidth: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_file_and_key(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = written(tmp_path, json.dumps(VALID | change))
    with pytest.raises(ConfigurationError) as refusal:
        load_profile(path)
    assert str(refusal.value).startswith(f"the idle profile {path} is wrong: {reason}")


def test_infinity_is_no_bandwidth(tmp_path: Path) -> None:
    text = json.dumps(VALID).replace('"bandwidth_bytes_per_s": 1000000000.0', '"bandwidth_bytes_per_s": 1e999')
    with pytest.raises(ConfigurationError, match="bandwidth_bytes_per_s: Input should be a finite number"):
        load_profile(written(tmp_path, text))


def test_a_file_that_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"profile\.json is wrong: Invalid JSON: .* at line 2 column"):
        load_profile(written(tmp_path, '{\n"iteration_s" 1}'))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json cannot be read: No such file or directory"):
        load_profile(tmp_path / "absent.json")

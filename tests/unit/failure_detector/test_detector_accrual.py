"""Phi accrual: suspicion is finite, grows with silence and is not fooled by a calm or a chatty past."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.failure_detector.accrual import ArrivalWindow
from gemini_ft.failure_detector.settings import DetectorSettings

intervals = st.lists(st.floats(0.0, 5.0), max_size=150)


def _window(arrivals: list[float], expected_interval_s: float = 0.25) -> ArrivalWindow:
    window = ArrivalWindow(expected_interval_s=expected_interval_s, num_intervals=100, deviation_floor_s=0.1)
    for interval in arrivals:
        window.add(interval)
    return window


@given(intervals, st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.floats(0.0, 20.0))
def test_phi_is_finite_and_never_falls_while_the_silence_grows(
    arrivals: list[float], one: float, other: float, pause_s: float
) -> None:
    window = _window(arrivals)
    shorter, longer = sorted((one, other))

    assert 0.0 <= window.phi(shorter, pause_s) <= window.phi(longer, pause_s) + 1e-9
    assert math.isfinite(window.phi(longer, pause_s))


@given(st.floats(29.0, 31.0))
def test_the_asymptote_meets_the_exact_tail(z: float) -> None:
    window = _window([])
    exact = -math.log10(0.5 * math.erfc(z / math.sqrt(2.0)))

    assert window.phi(0.25 + 0.1 * z, 0.0) == pytest.approx(exact, rel=1e-3)


def test_a_silence_of_one_half_chance_has_the_phi_of_one_half() -> None:
    assert _window([]).phi(0.25, 0.0) == pytest.approx(-math.log10(0.5))


def test_heartbeats_sent_out_of_turn_make_nobody_impatient() -> None:
    assert _window([0.01] * 100).mean_s == 0.25


def test_a_calm_past_does_not_make_a_small_delay_a_death() -> None:
    assert _window([0.25] * 100).phi(0.35, 0.0) < 1.0


def test_an_unsteady_past_makes_patient() -> None:
    steady, unsteady = _window([0.25] * 100), _window([0.05, 2.0] * 50)

    assert unsteady.phi(3.0, 0.0) < steady.phi(3.0, 0.0)


def test_only_the_newest_intervals_count() -> None:
    assert _window([60.0] * 50 + [0.5] * 100).mean_s == pytest.approx(0.5)


def test_settings_come_from_the_environment() -> None:
    environment = {"GEMINI_FT_DETECTOR_PATIENCE_S": "3.5", "GEMINI_FT_DETECTOR_NUM_INTERVALS": "7", "HOME": "/"}

    settings = DetectorSettings.from_environment(environment)

    assert (settings.patience_s, settings.num_intervals, settings.fail_phi) == (3.5, 7, 8.0)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("PATIENCE_S", "soon", "GEMINI_FT_DETECTOR_PATIENCE_S is 'soon'"),
        ("TICK_S", "0", "change GEMINI_FT_DETECTOR_TICK_S"),
        ("GRACE_S", "nan", "change GEMINI_FT_DETECTOR_GRACE_S"),
        ("SUSPECT_PHI", "9", "lower suspect_phi"),
        ("STALL_S", "2", "lower stall_s"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        DetectorSettings.from_environment({f"GEMINI_FT_DETECTOR_{name}": value})

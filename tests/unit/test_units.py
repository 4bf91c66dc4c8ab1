"""Quantities as a person reads them."""

import pytest

from hfdist.units import duration, energy, energy_unit, mass, money, short


@pytest.mark.parametrize(
    ("kwh", "words"),
    [(7.65e-6, "7.65 mWh"), (1e-9, "0.001 mWh"), (1e-12, "less than 0.001 mWh"), (0.0, "0 mWh"), (0.000_999_9, "1 Wh"),
     (0.045, "45 Wh"), (1.0, "1 kWh"), (12.34, "12.3 kWh"), (999.6, "1 MWh"), (1234.5, "1.23 MWh"),
     (1.5e7, "15,000 MWh")],
)  # fmt: skip
def test_energy_has_a_unit_that_fits_and_no_exponent(kwh, words):
    assert energy(kwh) == words


def test_a_curve_of_energy_has_the_unit_of_its_largest_value():
    factor, unit = energy_unit(0.0123)
    assert (f"{factor * 0.0123:.1f} {unit}") == energy(0.0123)


def test_durations_carry_over():
    words = [duration(seconds) for seconds in (0.9996, 5, 59.97, 119.7, 599.9, 3599, 7260)]
    assert words == ["1.0 s", "5.0 s", "1 min 0 s", "2 min 0 s", "10 min", "1 h 0 min", "2 h 1 min"]


def test_what_is_not_finite_has_words_too():
    assert [short(value) for value in (float("nan"), 1e4, 3.0, 0.0453)] == ["nan", "10 k", "3", "0.0453"]


def test_mass_and_money():
    assert [mass(grams) for grams in (0.0123, 12.0, 4567.0, 2e6)] == ["12.3 mg", "12 g", "4.57 kg", "2 t"]
    amounts = (0.0, 0.0001, 0.01, 1.5, 1234.5)
    assert [money(amount, "EUR") for amount in amounts] == [
        "0 EUR", "less than 0.01 EUR", "0.01 EUR", "1.50 EUR", "1,234 EUR",
    ]  # fmt: skip

from __future__ import annotations

from typing import Any

import pytest

from ckpt.options import Options, seconds, size
from storage_backends.throttle import Limits


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10min", 600), ("1.5h", 5400), ("2d", 172800), ("250ms", 0.25), (3, 3), (0.5, 0.5), (" 7 s ", 7)],
)
def test_durations_are_text_or_seconds(text: str | float, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("256MB", 256_000_000), ("512KiB", 524288), (4096, 4096), ("1 gib", 2**30)]
)
def test_sizes_are_text_or_bytes(text: str | int, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize(("value", "expected"), [("200MB/s", 2e8), ("1.5 MiB / s", 1572864), (1e6, 1e6), ("5b/sec", 5)])
def test_bandwidths_are_text_or_bytes_per_second(value: str | float, expected: float) -> None:
    assert Options(bandwidth=value).limits == Limits(bandwidth=expected)


@pytest.mark.parametrize(("value", "expected"), [("50/s", 50), ("0.5 / s", 0.5), (20, 20)])
def test_requests_are_text_or_a_number_per_second(value: str | float, expected: float) -> None:
    assert Options(requests=value).limits == Limits(requests=expected)


@pytest.mark.parametrize("text", ["", "10", "ten min", "-3s", -1, True, None, "3 parsecs"])
def test_nonsense_is_refused_and_says_what_was_expected(text: object) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        seconds(text)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a size"):
        size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("on_error", "bearable"), [("warn", None), ("raise", 1), (1, 1), (5, 5)])
def test_on_error_says_how_many_failures_in_a_row_can_be_borne(on_error: Any, bearable: int | None) -> None:
    assert Options(on_error=on_error).bearable == bearable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("restore_amplification", 0.9),
        ("restore_amplification", float("nan")),
        ("chunk", 500_000),
        ("chunk", "1KiB"),
        ("replica_check", -1),
        ("on_error", "ignore"),
        ("on_error", 0),
        ("on_error", True),
        ("on_error", 2.5),
        ("commit_wait", "soon"),
        ("grace", -1),
        ("memory", "1MB"),
        ("bandwidth", "200MB"),
        ("bandwidth", "0MB/s"),
        ("bandwidth", "fast/s"),
        ("bandwidth", True),
        ("requests", "50"),
        ("requests", 0),
        ("requests", float("inf")),
        ("requests", "nan/s"),
    ],
)
def test_a_wrong_option_is_named_at_once(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Options(**{name: value})  # type: ignore[arg-type]

"""Reading recorded orders: what the rows of the files mean."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shop.replay.made_up import made_up_records
from shop.replay.records import UnreadableFile, moment_of, read_records
from shop.replay.tempo import linear, logarithmic
from tests.shop.synthetic import Files, broken_rows, odd_orders


@pytest.mark.parametrize(
    ("local", "utc"),
    [
        ("2017-07-09 21:57:05", datetime(2017, 7, 10, 0, 57, 5, tzinfo=UTC)),
        ("2018-01-09 21:57:05", datetime(2018, 1, 9, 23, 57, 5, tzinfo=UTC)),  # daylight saving time
        ("2018-02-17 23:30:00", datetime(2018, 2, 18, 1, 30, tzinfo=UTC)),  # twice there: the first one
        ("2017-10-15 00:30:00", datetime(2017, 10, 15, 3, 30, tzinfo=UTC)),  # not there: an hour later on the clock
        ("2017-10-15 01:30:00", datetime(2017, 10, 15, 3, 30, tzinfo=UTC)),
    ],
)
def test_a_wall_clock_time_of_brazil_names_one_moment(local: str, utc: datetime) -> None:
    assert moment_of(local) == utc


@pytest.mark.parametrize("nothing", ["", "  ", None])
def test_an_empty_value_means_never(nothing: str | None) -> None:
    assert moment_of(nothing) is None


def test_no_step_comes_before_the_one_it_needs(tmp_path: Path) -> None:
    for record in read_records(*odd_orders().write(tmp_path)).records:
        steps = [record.placed_at, record.paid_at, record.accepted_at, record.delivered_at]
        reached = steps[: steps.index(None)] if None in steps else steps
        assert steps[len(reached) :] == [None] * (4 - len(reached))
        assert reached == sorted(moment for moment in reached if moment is not None)


def test_the_earliest_of_several_reviews_counts(tmp_path: Path) -> None:
    placed = datetime(2017, 6, 1, 12)  # noqa: DTZ001 - as in the files
    files = Files()
    files.add(placed, None, None, None, None, placed + timedelta(days=9), placed + timedelta(days=2), None)
    (record,) = read_records(*files.write(tmp_path)).records
    assert record.reviewed_at == datetime(2017, 6, 3, 15, tzinfo=UTC)


def test_rows_that_are_left_out_are_named(tmp_path: Path) -> None:
    whole = len(odd_orders().orders)
    reading = read_records(*broken_rows(odd_orders()).write(tmp_path))
    assert [record.order_id for record in reading.records[whole:]] == ["short"]
    assert len(reading.left_out) == 6
    assert any("orders.csv, line" in words and "is there already" in words for words in reading.left_out)
    assert any("reviews.csv, line" in words for words in reading.left_out)


def test_a_limit_counts_orders(tmp_path: Path) -> None:
    assert len(read_records(*odd_orders().write(tmp_path), limit=3).records) == 3


def test_a_file_without_its_key_column_is_refused(tmp_path: Path) -> None:
    orders, reviews = odd_orders().write(tmp_path, without=("order_purchase_timestamp",))
    with pytest.raises(UnreadableFile, match="no column order_purchase_timestamp"):
        read_records(orders, reviews)


@pytest.mark.parametrize("tempo", [linear(86_400), logarithmic(0.5)])
def test_compressed_time_keeps_what_was_longer_the_longer_one(tempo: object) -> None:
    spans = [timedelta(seconds=seconds) for seconds in (0, 1, 60, 1799, 1800, 86_400, 604_800)]
    compressed = [tempo(span) for span in spans]  # type: ignore[operator]
    assert compressed == sorted(set(compressed))
    assert compressed[0] == timedelta(0)


@pytest.mark.parametrize("wrong", [0, -1, float("nan")])
def test_a_speed_is_a_positive_number(wrong: float) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        linear(wrong)


def test_made_up_orders_are_the_same_each_time_and_go_every_way() -> None:
    records = made_up_records(60)
    assert records == made_up_records(60)
    assert any(record.paid_at is None for record in records)
    assert any(record.paid_at and not record.accepted_at for record in records)
    assert any(
        record.delivered_at and record.promised_at and record.delivered_at > record.promised_at for record in records
    )
    assert any(record.delivered_at and not record.reviewed_at for record in records)

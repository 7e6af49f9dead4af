from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.ballot import Ballot, Call, Tally
from ckpt.errors import CheckpointError, SaveFailed

ballots = st.builds(
    Ballot,
    call=st.sampled_from(Call),
    step=st.integers(0, 10**12 - 1),
    layout_changed=st.booleans(),
    buffers=st.integers(0, 2**63 - 1),
    failed=st.none() | st.integers(0, 10**12),
    refused=st.booleans(),
    stop=st.booleans(),
    busy=st.booleans(),
    renew=st.booleans(),
    again=st.booleans(),
)


@given(st.lists(ballots, min_size=1, max_size=5))
def test_the_maximum_of_all_votes_says_what_every_rank_must_know(cast: list[Ballot]) -> None:
    votes = [ballot.cast(rank) for rank, ballot in enumerate(cast)]
    assert all(-(2**63) <= value < 2**63 for vote in votes for value in vote)
    tally = Tally.count([max(column) for column in zip(*votes, strict=True)])
    assert tally.calls == (min(b.call for b in cast), max(b.call for b in cast))
    assert tally.steps == (min(b.step for b in cast), max(b.step for b in cast))
    assert tally.buffers_differ == (len({b.buffers for b in cast}) > 1)
    for name in ("layout_changed", "stop", "busy", "renew"):
        assert getattr(tally, name) == any(getattr(b, name) for b in cast)
    assert tally.again == all(b.again for b in cast)
    failed = [b.failed for b in cast if b.failed is not None]
    if failed:
        assert tally.failed is not None and tally.failed[0] == max(failed)
        assert cast[tally.failed[1]].failed is not None
    else:
        assert tally.failed is None
    assert (tally.refused is None) == (not any(b.refused for b in cast))
    assert tally.refused is None or cast[tally.refused].refused


@pytest.mark.parametrize(
    ("cast", "error", "says"),
    [
        ([Ballot(Call.SAVE, 4), Ballot(Call.STEP, 4)], CheckpointError, r"some ranks called save\(\) and others step"),
        ([Ballot(Call.RESTORE), Ballot(Call.SAVE, 4)], CheckpointError, r"called restore\(\) and others save"),
        ([Ballot(Call.SAVE, 4), Ballot(Call.SAVE, 6)], CheckpointError, "different steps, from 4 to 6"),
        ([Ballot(Call.SAVE, 4), Ballot(Call.SAVE, refused=True)], SaveFailed, "rank 1 could not capture"),
    ],
)
def test_ranks_that_cannot_go_on_together_are_told_why(cast: list[Ballot], error: type[Exception], says: str) -> None:
    votes = [ballot.cast(rank) for rank, ballot in enumerate(cast)]
    tally = Tally.count([max(column) for column in zip(*votes, strict=True)])
    with pytest.raises(error, match=says):
        tally.check(4)


def test_votes_of_all_calls_are_of_one_length() -> None:
    assert len({len(Ballot(call).cast(0)) for call in Call}) == 1

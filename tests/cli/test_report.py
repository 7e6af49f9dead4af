"""What `ckpt report` writes: a page that holds what the store tells, and nothing that the store's names could do."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ckpt.cli.page import scales
from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import bins, number_text, percent_text, ticks, typical_top, when_text
from ckpt.cli.page.style import style
from ckpt.cli.page.whole import MARK, page
from ckpt.format.kinds import KINDS
from recovery.chronicle import chronicle
from recovery.layers import choose, layers
from recovery.looking import History
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.cli.conftest import Ckpt
from tests.cli.living import keys, pin, restate, two_lines
from tests.support.faulty import FaultyStore
from tests.support.stores import DirectWriter, drifting, make_store, repeated

HOSTILE = "<script>alert('x')</script>\"'&\u202e\x00\n]]>-->"


class Page(HTMLParser):
    """The elements of a page, with their attributes and text, and whether every one that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def count(self, name: str, class_: str | None = None) -> int:
        return sum(n == name and (class_ is None or class_ in (a.get("class") or "").split()) for n, a in self.elements)

    def within(self, name: str) -> str:
        return " ".join(text for where, text in self.texts if where == name)


def made(store: Store) -> str:
    seen = History(store).look()
    told = chronicle(seen)
    return page(told, layers(store, choose([seen.snapshots[save.id] for save in told.saves])), now=1e9)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_it_is_one_file_that_needs_nothing_else(ckpt: Ckpt, tmp_path: Path) -> None:
    two_lines(tmp_path / "store")
    said = ckpt("report", tmp_path / "store", "-o", tmp_path / "r.html")
    assert (said.code, said.err) == (0, "")
    text = (tmp_path / "r.html").read_text()
    [line] = said.lines
    assert line.startswith("5 snapshots, 5 parts (") and f": {tmp_path / 'r.html'}, " in line
    found = Page(text)
    assert found.count("script") == found.count("img") == found.count("iframe") == 0
    assert [a for n, a in found.elements if n == "link"] == [{"rel": "icon", "href": "data:,"}]
    assert not [a for _, a in found.elements for key in a if key.startswith("on") or key == "src"]
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", text))
    assert "http" not in text.replace("http-equiv", "")
    [policy] = [a["content"] for n, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "script" not in policy


def test_every_picture_has_a_name_words_and_its_numbers(tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    restate(store, ids[1], blocked=0.25, durable=(500, 2.0))
    found = Page(made(store))
    ids_ = [a["id"] for n, a in found.elements if n == "section"]
    assert ids_ == ["timeline", "bytes", "heat", "times", "metrics", "chains", "recoveries"]
    pictures = [a for n, a in found.elements if n == "svg" and a.get("role") == "img"]
    assert len(pictures) == 2 * 7 and all(a.get("aria-label") for a in pictures)
    assert {a["class"] for a in pictures} == {"wide", "narrow"}
    assert all(a.get("aria-hidden") for n, a in found.elements if n == "svg" and a.get("role") != "img")
    assert found.count("desc") == len(pictures)
    assert found.count("details") == found.count("table") == 7
    labels = [a["aria-labelledby"] for n, a in found.elements if n == "section"]
    assert labels == [a["id"] for n, a in found.elements if n == "h2"]


def test_the_timeline_shows_lines_pins_and_what_was_abandoned(tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    pin(store, "good", ids[1])
    text = made(store)
    [wide] = re.findall(r'<svg class="wide" [^>]*aria-label="Timeline[^>]*>.*?</svg>', text)
    found = Page(wide)
    assert found.count("circle", "snap") == 5 and found.count("circle", "gone") == 2
    assert found.count("path", "pin") == 1 and found.count("circle", "newest") == 1
    assert found.count("path", "resume") == 1 and found.count("path", "crash") == 1
    titles = found.within("title")
    assert "generation 2 went on from step 500 of generation 1" in titles
    assert "step 600, 1/600, 2001-09-09 01:46 UTC, abandoned, pin good" in titles
    assert "good" in found.within("text")


def test_bars_and_cells_are_as_many_as_there_are_bytes_and_groups(tmp_path: Path) -> None:
    store = MemoryStore()
    make_store(store, drifting(4), ranks=2, chunk=4096)
    text = made(store)
    [bars] = re.findall(r'<svg class="wide" [^>]*aria-label="Bytes[^>]*>.*?</svg>', text)
    seen = History(store).look()
    stacked = sum(len([n for n in s.totals.by_kind.values() if n]) for s in seen.snapshots.values())
    rects = [a["class"] for n, a in Page(bars).elements if n == "rect"]
    # The first save towers above the deltas: its bar is cut off, and what is stacked highest is above the cut.
    assert stacked - 1 <= len(rects) <= stacked and set(rects) <= {f"k{kind}" for kind in KINDS}
    assert Page(bars).count("path", "cut") == 1 and len({rect for rect in rects if rect}) >= 5
    [heat] = re.findall(r'<svg class="wide" [^>]*aria-label="Share[^>]*>.*?</svg>', text)
    found = Page(heat)
    groups = layers(store, choose(list(seen.snapshots.values()))).groups
    assert found.count("rect", "cell") == 4 * len(groups)
    filled = [share for group in groups for share in group.shares if share]
    assert sum(found.count("rect", f"h{shade}") for shade in range(5)) == len(filled) > 8
    assert "model.still at 1/20: 0 %" in found.within("title")


def test_what_a_store_says_is_text_and_nothing_else() -> None:
    """Names of leaves, metrics, values of metrics, hosts, classes, urls: all of it is somebody else's."""
    store = MemoryStore()
    writer = DirectWriter(store, classes={HOSTILE: HOSTILE, "w" + HOSTILE: HOSTILE})
    writer.begin()
    for step in (1, 2):
        writer.step(step, {HOSTILE: np.ones(2000) * step, "w" + HOSTILE: np.ones(8)})
    for id_ in History(store).look().snapshots:
        restate(store, id_, metrics={HOSTILE: 1.0, "also": HOSTILE, "huge": 10**400, "nan": "nan"})
    text = made(store)
    found = Page(text)
    assert found.count("script") == 0 and "<script" not in text and "\x00" not in text and "\u202e" not in text
    assert "alert('x')" in found.within("h3"), "it is there to read"
    assert text.count("<!--") == 1 and "]]>" not in text


def test_a_long_history_of_many_ranks_has_a_page_of_bounded_size_and_bounded_requests() -> None:
    """1,000 snapshots x 8 ranks: as many documents as `ckpt list` reads, and some hundred parts; no pack."""
    store = FaultyStore(MemoryStore())
    [id_] = make_store(store, [{f"model.h.{n}.w": np.full((8, 4), float(n)) for n in range(40)}], ranks=8)
    repeated(store, id_, range(20, 1019))
    store.calls.clear()
    text = made(store)
    gets = [key for verb, key in store.calls if verb == "get"]
    assert sum(key.startswith("snapshots/") for key in gets) == 1000
    assert sum(key.startswith("parts/") for key in gets) <= 512
    assert len(store.calls) <= 1000 + 512 + 10 and not [key for key in gets if key.startswith("packs/")]
    assert len(text) < 1_000_000
    assert Page(text).count("svg") < 60


def test_an_empty_store_has_a_page_too(ckpt: Ckpt, tmp_path: Path) -> None:
    said = ckpt("report", tmp_path / "empty", "-o", tmp_path / "r.html")
    assert said.code == 0
    found = Page((tmp_path / "r.html").read_text())
    assert "none" in found.within("dd") and found.count("svg") == 1


def test_stores_of_a_version_that_measured_no_time_say_so(tmp_path: Path) -> None:
    store, _ = two_lines(tmp_path)
    assert "did not record how long it took" in made(store)


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_json_is_what_the_page_shows(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path / "store")
    restate(store, ids[1], blocked=0.25, durable=(500, 2.0))
    document = ckpt("report", tmp_path / "store", "-o", tmp_path / "r.html", "--json").json
    assert document["size"] == (tmp_path / "r.html").stat().st_size
    assert [(s["id"], s["abandoned"]) for s in document["saves"]] == [
        (str(id_), n in (1, 2)) for n, id_ in enumerate(ids)
    ]
    assert (document["saves"][0]["durable"], document["saves"][1]["blocked"]) == (2.0, 0.25)
    assert document["recoveries"][0]["lost"] == 200 and document["starts"][1]["resumed_from"] == str(ids[0])
    assert document["groups"] == [{"name": "w", "leaves": 1, "size": 512, "shares": [1.0, 0.0, 0.0, 1.0, 0.0]}]
    assert document["chains"][0]["most"] == [1] * 5 and document["parts"] == 5


def test_an_older_report_is_replaced_and_nothing_else_is(ckpt: Ckpt, tmp_path: Path) -> None:
    two_lines(tmp_path / "store")
    before = keys(two_lines(tmp_path / "store")[0])
    target = tmp_path / "deep" / "r.html"
    assert ckpt("report", tmp_path / "store", "-o", target).code == 0
    first = target.read_text()
    assert first.startswith(MARK) and ckpt("report", tmp_path / "store", "-o", target).code == 0
    target.write_text("<!doctype html>\n<p>mine</p>")
    said = ckpt("report", tmp_path / "store", "-o", target)
    assert said.code == 2 and "is not a report" in said.err
    assert target.read_text() == "<!doctype html>\n<p>mine</p>"
    said = ckpt("report", tmp_path / "store", "-o", tmp_path)
    assert said.code == 2 and "is not a report" in said.err
    assert [path.name for path in target.parent.iterdir()] == ["r.html"]
    assert keys(two_lines(tmp_path / "store")[0]) == before


# --- its pieces -------------------------------------------------------------------------------------------------------


def test_markup_escapes_what_it_did_not_make() -> None:
    assert tag("p", "<b>", tag("i", "&"), None, class_='"x"', aria_label="a<b") == (
        '<p class="&quot;x&quot;" aria-label="a&lt;b">&lt;b&gt;<i>&amp;</i></p>'
    )
    assert tag("rect", x=1.0, y=0.126, width=None) == '<rect x="1" y="0.13"/>'
    assert isinstance(join([tag("br"), tag("td")]), Markup) and join([tag("br"), tag("td")]) == "<br><td></td>"
    assert tag("p", "a" + tag("b", "x")) == "<p>a&lt;b&gt;x&lt;/b&gt;</p>", "what is put together by hand is text"


def test_numbers_are_written_as_people_write_them() -> None:
    assert [percent_text(s) for s in (None, 0.0, 0.001, 0.5, 0.999, 1.0)] == [
        "-",
        "0 %",
        "<1 %",
        "50 %",
        ">99 %",
        "100 %",
    ]
    assert [number_text(v) for v in (0.123456, 12345.0, float("inf"))] == ["0.1235", "12,345", "inf"]
    assert [when_text(t) for t in (None, 0.0, 1e30, float("nan"))] == [
        "unknown",
        "1970-01-01 00:00 UTC",
        "unknown",
        "unknown",
    ]


def test_axes_end_where_most_of_it_ends() -> None:
    assert ticks(0, 9, 4) == [0, 2, 4, 6, 8] and ticks(3, 3, 4) == [3] and ticks(0, float("inf"), 4) == [0]
    assert ticks(0, 2, 8, whole=True) == [0, 1, 2]
    assert typical_top([]) == 0 and typical_top([5, 6, 7]) == 7
    assert typical_top([100, *[1.0] * 20]) == 1.5
    assert bins(10, 3) == [(0, 3), (3, 6), (6, 10)] and bins(2, 8) == [(0, 1), (1, 2)] and bins(0, 5) == []
    assert scales.Scale(0, 10, 0, 100)(20) == 100, "what is off the axis stays on the picture"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_encoding_has_a_colour_and_a_texture(kind: int) -> None:
    text = style()
    assert f".k{kind}{{fill:url(#k{kind})}}" in text and text.count(f"--k{kind}:#") == 2

"""The report of a real training, opened in a real browser: nothing on its console, and the pictures are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.cli import main
from tests.support.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; 'apt-get install chromium' gives one"),
]


class Net(nn.Module):
    """Four layers, of which only the last two are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        for frozen in self.layers[:2]:
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def train(url: str, start: int | str | None, steps: int) -> None:
    """One start of the job: a save after every second step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with ckpt.Checkpointer(url, {"model": model, "optimizer": optimizer}, every=2) as saver:
        for step in range(saver.restore(start), steps):
            loss = (model(torch.randn(8, 96)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            saver.step(step + 1, metrics={"loss": loss})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two starts, the second from the middle of the first, with a pin."""
    folder = tmp_path_factory.mktemp("report")
    url = str(folder / "store")
    train(url, None, 12)
    assert main(["pin", url, "good", "1/8"]) == 0
    train(url, "good", 16)
    assert main(["report", url, "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


# What of a picture is on the screen: of the shapes of one class those with an extent, which are not hidden.
SEEN = """
[...document.querySelectorAll({what!r})].filter(e => {{
  const r = e.getBoundingClientRect(), s = getComputedStyle(e);
  return (r.width > 0 || r.height > 0) && s.visibility !== 'hidden' && s.fill + s.stroke !== 'nonenone';
}}).length
"""


def seen(browser: Browser, what: str) -> int:
    found: int = browser.ask(SEEN.format(what=what))
    return found


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, False), (1200, True), (320, False)])
def test_it_opens_without_a_word_and_shows_real_data(
    browser: Browser, report: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.said.clear()
    browser.asked.clear()
    browser.open(report.as_uri(), width, dark=dark)
    assert seen(browser, "#timeline .snap") >= 10 + 2  # of the picture that is shown, and its legend
    assert seen(browser, "#timeline .snap.gone") == 2 + 1
    assert seen(browser, "#timeline .resume") == 1 + 1 and seen(browser, "#timeline .pin") == 1 + 1
    assert seen(browser, "#bytes svg[role=img] rect") >= 10
    assert seen(browser, "#heat svg[role=img] .cell") >= 10 * 6
    filled = [seen(browser, f"#heat svg[role=img] .h{shade}") for shade in range(5)]
    assert filled[4] >= 10 * 3 and sum(filled) < seen(browser, "#heat svg[role=img] .cell"), "frozen layers stay empty"
    assert seen(browser, "#times svg .dot") >= 10 and seen(browser, "#metrics svg .curve") >= 1
    assert seen(browser, "#chains svg .curve") >= 2 and seen(browser, "#recoveries .cards li") == 1
    # Nothing sticks out, on a phone least of all.
    assert browser.ask("document.documentElement.scrollWidth") <= width
    stick_out = "[...document.querySelectorAll('body *:not(td,th,tr,tbody,thead,table,caption)')]"
    assert browser.ask(f"{stick_out}.filter(e => e.getBoundingClientRect().right > {width} + 1).length") == 0
    # Letters stay letters: none is drawn smaller than ten pixels.
    sizes = "[...document.querySelectorAll('svg[role=img] text')].filter(e => e.getBoundingClientRect().width)"
    assert browser.ask(f"Math.min(...{sizes}.map(e => e.getBoundingClientRect().height))") > 9
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) is dark
    assert browser.said == [] and browser.asked == [report.as_uri()]
    picture = tmp_path / "report.png"
    browser.picture(picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 30_000


def test_the_tables_unfold_and_scroll_by_themselves(browser: Browser, report: Path) -> None:
    browser.open(report.as_uri(), 390)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert seen(browser, "td") > 100
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert browser.said == []


def test_names_that_are_code_stay_names(browser: Browser, tmp_path: Path) -> None:
    """The escaping, and behind it a policy that lets nothing run: the page has one title, and no console."""
    hostile = "</title><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    with ckpt.Checkpointer(str(tmp_path / "store"), {hostile: torch.ones(4000)}) as saver:
        saver.save(1, metrics={hostile: 1.0}).wait()
    assert main(["report", str(tmp_path / "store"), "-o", str(tmp_path / "r.html")]) == 0
    browser.said.clear()
    browser.asked.clear()
    browser.open((tmp_path / "r.html").as_uri(), 390)
    assert browser.ask("document.title") == f"{tmp_path / 'store'}: checkpoints"
    assert hostile in browser.ask("document.body.textContent")
    assert browser.ask("document.querySelectorAll('script, img').length") == 0
    assert browser.said == [] and len(browser.asked) == 1
    assert browser.ask("document.documentElement.scrollWidth") <= 390

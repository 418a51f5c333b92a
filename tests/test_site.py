"""The documentation site in a browser, opened from disk: on a phone and on a desk, in light and dark, and its search."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag

import browser
import pytest
from browser import Page
from counts import LONG, count

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PHONE, DESK = 390, 1280
SCHEMES = {"light": "default", "dark": "slate"}


PAGES = [
    *sorted(path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")),
    "results/index.html",  # see docs/hooks.py
]
FOR_SERVERS = "404.html"
"""Its links are absolute, so it is not opened."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once."""
    for package in ("material", "mkdocstrings_handlers"):
        if find_spec(package) is None:
            pytest.skip("the site cannot be built: mkdocs-material or mkdocstrings[python] is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = browser.program()
    if path is None:
        pytest.skip(f"no browser is installed: one of {', '.join(browser.PROGRAMS)} (Debian: apt-get install chromium)")
    with browser.Browser(path, tmp_path_factory.mktemp("profile")) as running:
        yield running.page()


# What is checked in a page.

_SCRIPT = r"""
(() => {
  const parsed = (text) => {
    const found = text.match(/^rgba?\(([\d.]+), ([\d.]+), ([\d.]+)(?:, ([\d.]+))?\)$/);
    if (found) return [found[1] / 255, found[2] / 255, found[3] / 255, found[4] === undefined ? 1 : +found[4]];
    const mixed = text.match(/^color\(srgb ([\d.e-]+) ([\d.e-]+) ([\d.e-]+)(?: \/ ([\d.e-]+))?\)$/);
    if (mixed) return [+mixed[1], +mixed[2], +mixed[3], mixed[4] === undefined ? 1 : +mixed[4]];
    throw new Error("no colour: " + text);
  };
  const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
  const known = new Map([[null, [1, 1, 1, 1]]]);
  const behind = (element) => {
    if (!known.has(element)) {
      const own = parsed(getComputedStyle(element).backgroundColor);
      known.set(element, own[3] === 1 ? own : over(own, behind(element.parentElement)));
    }
    return known.get(element);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (light + 0.05) / (dark + 0.05);
  };
  const isShown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const pale = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || seen.has(element) || !isShown(element)) continue;
    seen.add(element);
    const below = behind(element), colour = over(parsed(getComputedStyle(element).color), below);
    const found = contrast(colour, below);
    if (found < 4.5) pale.set(`${colour.map((x) => x.toFixed(2))} on ${below.map((x) => x.toFixed(2))}`,
      `${found.toFixed(2)} ${element.className || element.tagName}: ${node.data.trim().slice(0, 40)}`);
  }
  const root = document.scrollingElement;
  // What scrolls inside a box is not cut; what is hidden at its edge is.
  const fits = (element) => element.getBoundingClientRect().right <= innerWidth + 1;
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const cut = [...document.querySelectorAll("article pre > code, article .picture, article table")].filter((element) => {
    for (let box = element; box && box.tagName !== "ARTICLE"; box = box.parentElement)
      if (scrolls(box) && fits(box)) return false;
    return !fits(element);
  });
  const wide = [...document.querySelectorAll("article pre > code")].filter((code) => code.scrollWidth > code.clientWidth);
  const boxes = [...document.querySelectorAll("article .md-typeset__scrollwrap, article .picture")];
  const unmarked = boxes.filter((box) =>
    (box.scrollLeft + box.clientWidth < box.scrollWidth - 1) !== box.classList.contains("has-more"));
  const pictures = [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src);
  return {
    wide: root.scrollWidth > root.clientWidth ? `${root.scrollWidth} > ${root.clientWidth}` : "",
    cut: cut.map((element) => element.textContent.slice(0, 60)),
    long: wide.map((code) => code.textContent.split("\n").reduce((a, b) => (a.length < b.length ? b : a))),
    unmarked: unmarked.map((box) => box.textContent.trim().slice(0, 60)),
    pale: [...pale].map(([colours, text]) => `${text} (${colours})`),
    empty: pictures,
    background: luminance(behind(document.body)),
  };
})()
"""


_TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"


def problems(page: Page, *, is_dark: bool) -> list[str]:
    """Return what is wrong with the open page at its present width and scheme."""
    page.evaluate(_TWO_FRAMES)  # scroll.js sees a new size when it is drawn
    found = page.evaluate(_SCRIPT)
    said = [f"the page scrolls to the side: {found['wide']}"] if found["wide"] else []
    said += [f"cut: {text}" for text in found["cut"]]
    said += [f"nothing shows that it scrolls, or it does not: {text}" for text in found["unmarked"]]
    if page.width >= DESK:
        said += [f"a line of code is longer than the page shows: {text}" for text in found["long"]]
    said += [f"contrast: {text}" for text in found["pale"]]
    said += [f"not loaded: {url}" for url in found["empty"]]
    if (found["background"] < 0.1) is not is_dark:
        said.append(f"luminance of the background: {found['background']}")
    return said


def foreign(page: Page) -> list[str]:
    """Return the requests to elsewhere since the page was opened."""
    return [url for url in page.requests() if not url.startswith(("file:", "data:", "about:"))]


@pytest.mark.matrix
@pytest.mark.costly("Chromium lays out a page, and the longest ones take two seconds")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if k % 4 and not LONG else []) for k, name in enumerate(PAGES)]
)
def test_c246_page(name: str, site: Path, page: Page) -> None:
    """In `make test` each fourth page, in one view; in `make pages` all pages, at the width of a phone and of a desk."""
    found = []
    views = [(DESK, "light"), (PHONE, "dark")]
    if PAGES.index(name) // 4 % 2:  # both views have their turn
        views.reverse()
    for width, scheme in views[: count(1, 2)]:
        page.resize(width)
        page.prefer(scheme)
        if (width, scheme) == views[0]:
            page.open((site / name).as_uri())
        page.wait(f"document.body.dataset.mdColorScheme === '{SCHEMES[scheme]}'")
        found += [f"{width} px, {scheme}: {text}" for text in problems(page, is_dark=scheme == "dark")]
    assert found == []
    assert foreign(page) == []


# The search.


SEARCHED = {
    "kubernetes": "howto/kubernetes.html",
    "warm start": "howto/warm-start.html",
    "InstantTensor": "comparison.html",
    "DiskCache": "reference/loading.html",
    "TruncatedError": "reference/errors.html",
    "SGLANG_PLUGINS": "frameworks/sglang.html",
}
"""What is typed, and a page that must be among the first three pages that are found. Of the last one, it is the first."""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "width"), [("index.html", PHONE), ("reference/errors.html", DESK)])
def test_c244_search_finds(start: str, width: int, site: Path, page: Page) -> None:
    """By typing into the field, on pages at different depths. Each word on one of them; in `make pages` on both."""
    page.prefer("light")
    page.resize(width)
    page.open((site / start).as_uri())
    if width == PHONE:
        page.evaluate("document.querySelector('label[for=__search].md-header__button').click()")
    page.evaluate("document.querySelector('.md-search__input').focus()")
    *words, last = SEARCHED.items()
    for text, expected in [*(words if LONG else words[width == DESK :: 2]), last]:
        page.evaluate("document.querySelector('.md-search__input').select()")
        page.type(text)
        url = (site / expected).as_uri()
        page.wait(f"({_FOUND}).slice(0, 3).includes({url!r})")
    assert foreign(page) == []
    page.follow(".md-search-result__link")
    assert page.evaluate("location.href").startswith(url)


_FOUND = """[...new Set(
  [...document.querySelectorAll(".md-search-result__link")].map((link) => link.href.replace(/[?#].*/, ""))
)]"""


@pytest.mark.slow
def test_c244_search_says_that_it_finds_nothing(site: Path, page: Page) -> None:
    page.open((site / "index.html").as_uri())
    page.evaluate("document.querySelector('.md-search__input').focus()")
    page.type("zyzzyva")
    page.wait("document.querySelector('.md-search-result__meta').textContent.includes('No matching')")
    assert page.evaluate("document.querySelectorAll('.md-search-result__link').length") == 0


# Links.


class Links(HTMLParser):
    """The identifiers and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.identifiers.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


def broken(site: Path) -> list[str]:
    """Return the links between files of the site that lead nowhere."""
    parsed = {path: Links(path) for path in site.rglob("*.html") if path.name != FOR_SERVERS}
    found = []
    for path, links in parsed.items():
        for target in links.targets:
            if target.partition(":")[0] in ("http", "https", "data", "mailto"):
                continue
            address, anchor = urldefrag(target)
            file = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            if not file.is_file():
                found.append(f"{path.relative_to(site)}: {target}")
            elif anchor and file.suffix == ".html" and unquote(anchor) not in parsed[file].identifiers:
                found.append(f"{path.relative_to(site)}: {target} has no such anchor")
    return found


@pytest.mark.costly("Chromium")
def test_links_and_anchors_exist(site: Path) -> None:
    assert broken(site) == []


SHOWN = {
    "loading": {
        "stio.RemoteRoot": {"path", "listdir", "close"},
        "stio.HostCache": {"prefetch", "stats", "evict", "close"},
        "stio.DiskCache": {"path", "max_bytes", "stats", "leftovers", "evict"},
        "stio.WarmStart": {"done", "aclose"},
    },
    "pool": {"stio.ModelPool": {"add", "use", "prefetch", "update", "status", "names", "stats", "aclose"}},
    "events": {"stio.Trace": {"spans", "save_chrome", "save_svg"}},
    "distributed": {
        "stio.distributed.save": {"save"},
        "stio.distributed.StioStorageReader": set[str](),
        "stio.distributed.StioStorageWriter": {"result"},
    },
    "integrations": {"stio.integrations.transformers.StioCallback": {"resume", "wait"}},
}
"""What the reference shows of classes that have other members for stio, torch or a framework to call."""


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "members"), SHOWN.items())
def test_the_reference_shows_what_users_call(name: str, members: dict[str, set[str]], site: Path) -> None:
    text = (site / "reference" / f"{name}.html").read_text("utf-8")
    found = set(Links(site / "reference" / f"{name}.html").identifiers)
    for owner, shown in members.items():
        assert owner in found
        assert {each.rpartition(".")[2] for each in found if each.rpartition(".")[0] == owner} == shown
    assert "LoadOptions, order" not in text, "parameters that are for tests, or for stio"


def test_every_file_of_html_is_checked(site: Path) -> None:
    assert sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html")) == sorted([*PAGES, FOR_SERVERS])


# The checks can fail.


def bad_page(folder: Path, body: str, style: str = "") -> str:
    path = folder / "bad.html"
    path.write_text(
        f"<!DOCTYPE html><html><head><meta name=viewport content='width=device-width'><style>{style}</style></head>"
        f"<body>{body}</body></html>"
    )
    return path.as_uri()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("body", "style", "said"),
    [
        ("<p>fine</p>", "", []),
        ("<p>fine</p>", "body{background:#000;color:#fff}", ["luminance"]),
        ("<p>pale</p>", "p{color:#888}", ["contrast"]),
        ("<p>pale</p>", "p{color:#000a;background:#888}", ["contrast"]),
        ("<p>hidden</p>", "p{color:#888;visibility:hidden}", []),
        ("<div style='width:500px'>wide</div>", "", ["the page scrolls to the side"]),
        (f"<article><pre><code>{'x' * 200}</code></pre></article>", "pre{overflow:hidden}", ["cut"]),
        (f"<article><pre><code>{'x' * 200}</code></pre></article>", "pre{overflow:auto}", []),
        ("<img src='missing.svg'>", "", ["not loaded"]),
        ("<article><p class=picture><b>wide</b></p></article>", "p{overflow:auto}b{padding:500px}", ["nothing shows"]),
        ("<article><p class='picture has-more'>fits</p></article>", "", ["nothing shows"]),
    ],
)
def test_a_bad_page_is_found(body: str, style: str, said: list[str], tmp_path: Path, page: Page) -> None:
    page.prefer("light")
    page.resize(PHONE)
    page.open(bad_page(tmp_path, body, style))
    found = problems(page, is_dark=False)
    assert [text.partition(":")[0].partition(" of ")[0].partition(" that ")[0] for text in found] == said


def test_a_long_line_of_code_is_found_at_a_desk_only(tmp_path: Path, page: Page) -> None:
    page.prefer("light")
    url = bad_page(
        tmp_path, f"<article><pre><code>{'x' * 200}</code></pre></article>", "code{display:block;overflow:auto}"
    )
    for width, number in ((DESK, 1), (PHONE, 0)):
        page.resize(width)
        page.open(url)
        assert len(problems(page, is_dark=False)) == number


WIDE = {"index.html": "article .picture", "versions.html": "article .md-typeset__scrollwrap"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_the_right_end_of_a_wide_box_can_be_reached_on_a_phone(name: str, site: Path, page: Page) -> None:
    """It fades while there is more, and the keyboard scrolls it."""
    page.resize(PHONE)
    page.open((site / name).as_uri())
    box = f"document.querySelector({WIDE[name]!r})"
    page.wait(f"{box}.classList.contains('has-more')")
    assert page.evaluate(f"getComputedStyle({box}).maskImage").startswith("linear-gradient")
    assert page.evaluate(f"{box}.tabIndex") == 0
    page.evaluate(f"{box}.scrollLeft = {box}.scrollWidth")
    page.wait(f"!{box}.classList.contains('has-more')")
    last = "[...this.querySelectorAll('img, th')].pop().getBoundingClientRect().right <= innerWidth"
    assert page.evaluate(f"(function () {{ return {last} }}).call({box})")


@pytest.mark.slow
def test_outputs_look_unlike_code_and_have_no_button(site: Path, page: Page) -> None:
    page.resize(DESK)
    page.open((site / "tutorial.html").as_uri())
    page.wait("document.querySelector('.language-python .md-code__nav')")
    assert page.evaluate("document.querySelectorAll('.output').length") > 5
    assert page.evaluate("document.querySelectorAll('.output .md-code__nav').length") == 0
    ground = "getComputedStyle(document.querySelector('.%s pre > code')).backgroundColor"
    assert page.evaluate(f"{ground % 'output'} !== {ground % 'language-python'}")
    assert page.evaluate("getComputedStyle(document.querySelector('.output'), '::before').content") == '"Output"'


def test_readers_of_the_site_do_not_see_why_code_is_not_run(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert "<!-- not run" not in path.read_text("utf-8"), path


def test_c244_a_request_to_elsewhere_is_found(tmp_path: Path, page: Page) -> None:
    page.open(bad_page(tmp_path, "<img src='http://127.0.0.1:9/x.png'>"))
    assert foreign(page) == ["http://127.0.0.1:9/x.png"]


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    bad_page(tmp_path, "<a href='bad.html#here' id='here'></a><a href='gone.html'></a><a href='#gone'></a>")
    assert broken(tmp_path) == ["bad.html: gone.html", "bad.html: #gone has no such anchor"]

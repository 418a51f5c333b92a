"""The pages in docs/: their code runs and prints what they show. The navigation of the site is complete."""

from __future__ import annotations

import re
import runpy
import shutil
import signal
import socket
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import captures
import pages
import pytest
import torch
import yaml
from captures import CAPTURED
from crash.zygote import Zygote
from distributed.ranks import PRELOADED
from pages import DOCS, ROOT, Block, PageError

import stio
from benchmarks import bar_chart, overview, report

PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
WITH_CODE = [page for page in PAGES if pages.blocks_of(DOCS / page)]
SLOW_PAGES = {"howto/command-line.md", "howto/distributed-saves.md", "howto/distributed.md", "reference/commands.md"}
"""Pages whose code starts many processes or ranks, for 3 to 10 seconds of processor time."""
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.fixture(scope="module")
def page_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return the parent of processes that begin with what the launcher of ranks and their code import."""
    modules = ["torch.distributed.run", *PRELOADED, "support"]
    zygote = Zygote(tmp_path_factory.mktemp("output"), modules)
    yield zygote
    zygote.close()


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restore what SIGTERM does: a page changes it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW_PAGES else ()) for page in WITH_CODE]
)
@pytest.mark.filterwarnings(
    "ignore:stio.sync blocks the running event loop:RuntimeWarning"
)  # the pages explain the warning
@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"
)  # one process saves the DCP checkpoint of the page
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_zygote: Zygote) -> None:
    """Commands run in forked processes: an import of torch for each would take most of the time."""
    monkeypatch.setattr(pages, "PYTHON", str(page_zygote.python))
    monkeypatch.setenv("PYTHON_EXEC", str(page_zygote.python))  # what torchrun starts its workers with
    monkeypatch.chdir(tmp_path)
    with SERVERS.get(page, nothing)(monkeypatch, tmp_path) as port:
        names = pages.run_page(DOCS / page, port=port or pages.PORT)
    is_code = [
        block.language == "python" and block.runs and not block.is_file for block in pages.blocks_of(DOCS / page)
    ]
    assert (names.keys() > {"__name__"}) is any(is_code)
    if page == "migration.md":
        assert torch.equal(names["row"], torch.tensor([[3.0, 4.0, 5.0]]))


TINY = {
    "embed.weight": torch.zeros(256, 32),
    "head.weight": torch.zeros(256, 32),
    "head.bias": torch.zeros(256),
}
"""The model that the pages load from servers."""


@contextmanager
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run a store on this machine that has the checkpoint of the page; the environment names it."""
    for package in ("obstore", "moto", "boto3"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(ROOT / "tests" / "remote")
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with import_module("servers").s3_server() as (client, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        monkeypatch.setenv("HOME", str(tmp_path))
        stio.sync.save(TINY, tmp_path / "tiny.safetensors")
        client.create_bucket(Bucket="models")
        client.upload_file(str(tmp_path / "tiny.safetensors"), "models", "tiny/model.safetensors")
        yield


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run a hub on this machine that has the repository of the page."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.syspath_prepend(ROOT / "tests" / "remote")
    fake: Any = import_module("fake_hub")
    stio.sync.save(TINY, tmp_path / "model.safetensors")
    with fake.fake_hub() as running:
        fake.use(running.url, monkeypatch, tmp_path / "cache")
        repository = running.repositories["stio/tiny"] = fake.Repository()
        repository.commit({"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
        yield


def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def free_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """Give a port for the server that the page starts, and that its clients reach without a proxy."""
    for package in ("fastapi", "httpx", "uvicorn"):
        pytest.importorskip(package)
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "localhost")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    yield port


SERVERS = dict(zip(pages.NEED_SERVERS, (store, hub, free_port), strict=True))
"""What runs beside the code of a page, or the port for its own server."""


def test_the_tutorial_can_be_pasted(tmp_path: Path, page_zygote: Zygote) -> None:
    pages.run_in_repl(pages.blocks_of(DOCS / "tutorial.md"), cwd=tmp_path, python=str(page_zygote.python))


# The output of commands, and their pictures.


DRAWN_BY_EXAMPLES = {"demo.svg": "demo_picture.py", "pool.svg": "pool_demo.py"}
PICTURES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.svg") if path.parent.name != "assets")


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_on_a_page_and_have_the_current_style(picture: str, tmp_path: Path) -> None:
    text = (DOCS / picture).read_text()
    root = ElementTree.fromstring(text)
    shown = {"".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")}
    name = picture.rpartition("/")[2]
    assert any(f"{name})" in (DOCS / page).read_text() for page in PAGES)
    if name in DRAWN_BY_EXAMPLES:
        code = (ROOT / "examples" / DRAWN_BY_EXAMPLES[name]).read_text()
        assert root.findtext("{http://www.w3.org/2000/svg}style") in code
        return
    is_timeline = 'class="plot"' in text
    assert style_of(text) == style_of(timeline_of_a_save(tmp_path) if is_timeline else bar_chart_of_one_rate())
    assert any(label.startswith("read " if is_timeline else "stio ") for label in shown)


def style_of(svg: str) -> str:
    """Return the style of a picture."""
    match = re.match(r'<svg class="stio[^>]*>(<style>.*?</style>)', svg, re.DOTALL)
    assert match is not None
    return match[1]


def timeline_of_a_save(directory: Path) -> str:
    trace = stio.Trace()
    stio.sync.save({"w": torch.zeros(4)}, directory / "w.safetensors", trace=trace)
    trace.save_svg(directory / "save.svg")
    assert 'class="plot"' in (directory / "save.svg").read_text()
    return (directory / "save.svg").read_text()


def bar_chart_of_one_rate() -> str:
    return bar_chart.draw_panels([bar_chart.Panel("one", [bar_chart.Rate("stio", 2.0, 1.0, 3.0, "ours")])])


def test_a_capture_that_takes_minutes_has_the_shape_of_its_command() -> None:
    left_out = [
        block for page in WITH_CODE for block in pages.blocks_of(DOCS / page) if block.reason.startswith(CAPTURED)
    ]
    assert [block.page for block in left_out] == ["howto/command-line.md"]
    ((command, shown),) = pages.commands(left_out[0])
    assert command == "stio bench"
    head, limit, *rest = shown.splitlines()
    assert head.split() == ["median", "rate", "fastest", "slowest"]
    assert re.fullmatch(r"disk's limit +[\d.]+ s +[\d.]+ [MG]B/s +[\d.]+ s +[\d.]+ s", limit)
    assert any(line.startswith("stio reaches ") for line in rest)


def test_captures_write_the_output_into_the_page(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        "# Page\n\n```console\n$ echo 1; printf '<svg/>' > a.svg\n2\n$ echo 3 4\n...4\n$ true\n```\n\n![a](a.svg)\n"
        f"<!-- not run: {CAPTURED}why -->\n```console\n$ echo 5\n?\n```\n"
        "<!-- not run: why -->\n```console\n$ exit 1\n6\n```\n",
    )
    captures.renew(page)
    assert page.read_text() == (
        "# Page\n\n```console\n$ echo 1; printf '<svg/>' > a.svg\n1\n$ echo 3 4\n...4\n$ true\n```\n\n![a](a.svg)\n"
        f"<!-- not run: {CAPTURED}why -->\n```console\n$ echo 5\n5\n```\n"
        "<!-- not run: why -->\n```console\n$ exit 1\n6\n```\n"
    )
    assert (tmp_path / "a.svg").read_text() == "<svg/>"


def test_the_failure_messages_show_every_error_class() -> None:
    text = (DOCS / "faq.md").read_text()
    kinds = [
        kind
        for name in stio.__all__
        if isinstance(kind := getattr(stio, name), type) and issubclass(kind, stio.StioError)
    ]
    assert [kind.__name__ for kind in kinds if kind is not stio.StioError and kind.__name__ not in text] == []


# The site.


def listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in listed(item)]


def test_the_navigation_names_every_page_once() -> None:
    assert sorted(listed(SITE["nav"])) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_links_and_includes_point_to_existing_files(page: str) -> None:
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        beside = ROOT / "benchmarks" if target.startswith("results/") else (DOCS / page).parent  # see docs/hooks.py
        assert target.startswith("https://") or (beside / target).is_file(), target
    for target in re.findall(r'^--8<-- "(.+)"$', text, re.MULTILINE):
        assert (ROOT / target).is_file(), target
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / target).read_text()):
            is_on_site = link.startswith(("https://", "results/")) or (DOCS / link).is_file()
            assert is_on_site and (link.startswith("https://") or (ROOT / target).parent.joinpath(link).exists()), link


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join((DOCS / page).read_text() for page in PAGES if page.startswith("reference/"))
    found = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(found) == len(set(found))
    for name in set(stio.__all__) - {"__version__", "sync"}:
        assert f"stio.{name}" in found, name
    assert [name for name in found if pages.find(name) is None] == []


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_has_lines_that_the_page_shows_whole(page: str) -> None:
    """At a width of 1,280 pixels; outputs and consoles wrap. `test_site.py` measures it in a browser."""
    blocks = [block for block in pages.blocks_of(DOCS / page) if block.language in ("python", "yaml")]
    long = [f"{block.place}: {line}" for block in blocks for line in block.text.splitlines() if len(line) > 100]
    assert long == []


def test_the_charts_of_the_benchmarks_are_drawn_from_the_recorded_figures() -> None:
    """By `python -m benchmarks.overview`. The page begins with one of them."""
    for name, chart in overview.charts().items():
        assert (ROOT / "benchmarks" / "results" / name).read_text() == chart, name
    _, _, first, *_ = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    assert first.endswith("(results/overview.svg)")


@pytest.mark.parametrize("module", ["load", "save", "compat", "frameworks", "server", "distributed"])
def test_benchmarks_publish_between_the_markers_of_their_tables(module: str, tmp_path: Path) -> None:
    suite = import_module(f"benchmarks.{module}").SUITE
    page = tmp_path / "tables.md"
    page.write_text((ROOT / "benchmarks" / "tables.md").read_text())
    report.publish(suite, [], "the new report\n", tmp_path / "chart.svg", page)
    begin, end = suite.markers
    assert page.read_text().split(begin)[1].split(end)[0].strip() == "the new report"


def test_every_page_links_to_the_code_if_the_project_names_its_repository(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    on_config = runpy.run_path(str(DOCS / "hooks.py"))["on_config"]
    for urls, expected in (("", None), ('urls = {Repository = "https://host/team/stio"}', "https://host/team/stio")):
        (tmp_path / "pyproject.toml").write_text(f"[project]\n{urls}\n")
        config = SimpleNamespace(config_file_path=str(tmp_path / "mkdocs.yml"), repo_url=None, repo_name=None)
        on_config(config)
        assert config.repo_url == expected
        assert config.repo_name == (expected and "team/stio")


def test_make_docs_builds_strictly() -> None:
    assert SITE["strict"] is True
    assert re.search(r"^docs: .*\n\t.*mkdocs build", (ROOT / "Makefile").read_text(), re.MULTILINE)


# The checks of pages can fail.


def page_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "page.md").write_text(text)
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1\n", "a 1\n", True),
        ("a 1\n", "a 2\n", False),
        ("a ... s\n", "a 0.25 s\n", True),
        ("a 1.5 s, 3.2 GB/s\n", "a 20 ms, 910 MB/s\n", True),
        ("a 1.5 s\n", "a 3 GB/s\n", False),
        ("a 1.5 GB\n", "a 1.6 GB\n", False),
        ("a1.5 s b\n", "a1.6 s b\n", False),
        ("a 3 steps\n", "a 4 steps\n", False),
        ("a ... s\n", "a 0.25 ms or so\n", False),
        ("a...\n", "a\nb\n", False),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n...\nz\n", "a\nb\nc\n", False),
        ("(a) [b]\n", "(a) [b]\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n", "", False),
        ("", "", True),
    ],
)
def test_shown_output_is_compared_with_printed_output(shown: str, printed: str, same: bool) -> None:
    assert pages.agrees(shown, printed) is same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:2: the page shows\n2\n"),
        ("```python\nprint(1)\n```\n", "no text"),
        ("```python\nprint(1)\n```\n\n```text\n...\n```\n", "no text"),
        ("```console\n$ echo 1\n2\n```\n", "the page shows\n2\n"),
        ("```console\n$ exit 3\n```\n", "exit status 3"),
        ("```console\nls\n```\n", "starts with a command"),
        ("```text\n1\n```\n", "no Python before it"),
        ("```sh\nls\n```\n", "sh is not one of"),
        ("```\nls\n```\n", "no language"),
        ("- list\n\n    ```python\n    1\n    ```\n", "a fence is indented"),
        ('```python norun="1"\n1\n```\n', "unknown options"),
        ("<!-- not run -->\n```python\n1\n```\n", "with no reason"),
        ("<!-- not run: why -->\n\n```python\n1\n```\n", "not directly above a fence"),
        ('```python title="Not run here: why"\n1\n```\n', "readers see the title"),
        ('<!-- not run: why -->\n```python title="Not run here"\n1\n```\n', "readers see the title"),
        ("```yaml\na: 1\n```\n", "yaml is not run here"),
        ('```python title="Listing one"\n1\n```\n', "is a file name"),
        ("<!-- not run: why -->\n```python\nstio.lode(1)\n```\n", "stio has no stio.lode"),
        ("<!-- not run: why -->\n```python\nawait stio.load(1, devise=2)\n```\n", r"stio.load\(devise=\)"),
        ("<!-- not run: why -->\n```python\nstio.Saver(keep=2)\n```\n", r"stio.Saver\(keep=\)"),
        ("<!-- not run: why -->\n```python\nfrom stio import lode\n```\n", "stio.lode"),
        ("<!-- not run: why -->\n```python\nimport stio.lode\n```\n", "stio.lode"),
    ],
)
def test_a_wrong_page_fails(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=said):
        pages.run_page(page_of(tmp_path, text))


def test_code_that_fails_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        pages.run_page(page_of(tmp_path, "# Page\n\n```python\na = 1\na / 0\n```\n"))
    assert caught.traceback[-1].lineno == 4  # pytest counts from 0
    with pytest.raises(SyntaxError):
        pages.check_unrun(Block("page.md", 1, "python", "", "def\n", "why"))


def test_blocks_that_cannot_run_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        '<!-- not run: a GPU -->\n```python title="On a GPU"\nimport stio\nraise SystemExit(await stio.load("m", device="cuda"))\n```\n'
        "<!-- not run: it downloads -->\n```console\n$ exit 1\n```\n"
        '```python title="made.py"\nprint("made")\n```\n```console\n$ python made.py\nmade\n```\n'
    )
    pages.run_page(page_of(tmp_path, text))


def test_a_page_that_cannot_be_pasted_fails(tmp_path: Path) -> None:
    page = page_of(tmp_path, "```python\nfor k in range(2):\n    print(k)\nprint(3)\n```\n\n```text\n0\n1\n3\n```\n")
    with pytest.raises(PageError, match="SyntaxError"):
        pages.run_in_repl(pages.blocks_of(page), cwd=tmp_path)


def test_a_server_of_a_page_has_a_free_port_and_ends_with_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with free_port(monkeypatch, tmp_path) as port:
        start = f"echo hello > a.txt; python -m http.server {port} --bind 127.0.0.1"
        text = f"```console\n$ {start} &\n$ curl localhost:8000/a.txt\nhello\n```\n"
        pages.run_page(page_of(tmp_path, text), port=port)
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_server_that_does_not_start_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with free_port(monkeypatch, tmp_path) as port, pytest.raises(PageError, match="no server listens(.|\n)*no module"):
        pages.run_page(page_of(tmp_path, "```console\n$ echo no module &\n```\n"), port=port)


@pytest.mark.matrix
@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_readers_do_not_see_why_code_is_not_run(page: str) -> None:
    """README has no hook of mkdocs: what is in its source is what a git host shows, but for comments."""
    text = (ROOT / page if page == "README.md" else DOCS / page).read_text()
    seen = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert not re.search(r"not run (here|by the tests)", seen, re.IGNORECASE)


def test_the_reference_starts_with_an_example() -> None:
    first, second, *_ = pages.blocks_of(DOCS / "reference" / "index.md")
    assert (first.language, second.language) == ("python", "text")
    before = (DOCS / "reference" / "index.md").read_text().split("```")[0]
    assert before.split() == ["#", "Reference"]

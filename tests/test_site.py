"""The site: built without a warning, every public name in it, at work in a real Chromium, narrow, wide, dark."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = ["README", "docs/claims", "docs/howto", "docs/concepts", "docs/words", "docs/reference/influence"]
PAGES += ["results/MISPRINTS", *(f"notebooks/{path.stem}" for path in sorted(ROOT.glob("notebooks/*.ipynb")))]
PAGES += [str(path.relative_to(ROOT).with_suffix("")) for path in sorted(ROOT.glob("results/**/README.md"))]
WIDTHS, SCHEMES = (390, 1400), ("light", "dark")
pytestmark = [
    pytest.mark.site,
    pytest.mark.timeout(1200),  # by the clock, on a busy machine; the processor's time is asserted below
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_nb", "furo")),
        reason="the site needs its extra: pip install '.[site]'",
    ),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-b", "html", "-d"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    begun = os.times().children_user
    done = subprocess.run(
        [*command, str(folder / "trees"), ".", str(folder / "html")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert os.times().children_user - begun < 90  # seconds of one processor
    return folder / "html"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    names = runpy.run_path(str(ROOT / "docs" / "conf.py"))["public_names"]()
    with (site / "objects.inv").open("rb") as file:
        inventory: Any = InventoryFile.load(file, "", lambda base, uri: uri)
    found = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    assert len(names) > 150
    assert sorted(set(names) - found) == []


def test_every_module_with_public_names_has_a_page() -> None:
    packages = runpy.run_path(str(ROOT / "docs" / "conf.py"))["PACKAGES"]
    listed = {path.parent.name for path in (ROOT / "src" / "curvlab").glob("*/__init__.py")} - {"lab"}
    assert set(packages) == listed


def test_no_page_names_a_path_of_the_machine(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert str(ROOT) not in path.read_text(encoding="utf-8"), path.name


def test_problems_name_what_is_wrong_with_each_bad_trace() -> None:
    shown = runpy.run_path(str(ROOT / "docs" / "bad_traces.py"))
    (_, good), *bad = shown["cases"]()
    assert not good.problems
    assert [name for name, _ in bad] == list(shown["WORDS"])
    for name, llc in bad:
        assert shown["WORDS"][name] in " ".join(llc.problems), name


# ------------------------------------------------------------------------------------ in a browser
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_say_nothing_on_the_console_and_do_not_scroll_sideways(
    site: Path, browser: Any, width: int, scheme: str
) -> None:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("requestfailed", lambda request: messages.append(request.url))
    page.on("request", lambda request: messages.extend([request.url] * request.url.startswith("http")))
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0, name
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 384) == (scheme == "dark"), name
    assert messages == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_filter_of_claims_and_the_search_work(site: Path, browser: Any, width: int) -> None:
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.goto((site / "docs" / "claims.html").as_uri())
    rows = page.locator("#claims tbody tr:visible")
    everything = rows.count()
    assert everything > 1000
    page.fill("#claims-words", "lissa-fig1 recommended")
    some = rows.count()
    assert 0 < some < everything
    assert page.text_content("#claims-count") == f"{some} of {everything} claims"
    page.select_option("#claims-verdict", "reproduced")
    assert 0 < rows.count() < some
    assert set(rows.locator('td[data-label="verdict"]').all_text_contents()) == {"reproduced"}
    page.goto((site / "search.html").as_uri() + "?q=mislabelled")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li").count() > 1


def test_the_front_leads_to_the_readme(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.wait_for_url("**/README.html")
    assert page.text_content("h1").startswith("curvlab")

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from curvlab.reporting.report import build_report, main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page is shown in a frame, since a headless window is never narrower than 500 px; the frame's findings
# travel up as a message and end in the attributes that --dump-dom prints.
PROBE = """<script>
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  const form = document.getElementById("filters");
  form.elements.verdict.value = "not reproduced";
  form.dispatchEvent(new Event("change"));
  const rows = [...document.querySelectorAll(".scoreboard tbody tr")];
  parent.postMessage({
    window: window.innerWidth,
    content: document.documentElement.scrollWidth,
    images: [...document.images].filter((image) => image.complete && image.naturalWidth > 0).length,
    shown: rows.filter((row) => row.offsetHeight > 0).length,
  }, "*");
});
</script></body>"""
FRAME = """<!DOCTYPE html><html><body><script>
window.addEventListener("message", (event) => Object.assign(document.documentElement.dataset, event.data));
</script><iframe src="probed.html" style="border: 0; width: {width}px; height: 800px"></iframe></body></html>"""


@pytest.fixture
def page(results: Path) -> str:
    return build_report(results).page.read_text(encoding="utf-8")


def test_page_needs_no_other_file(page: str) -> None:
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)|@import""", page)
    assert all(link.startswith(("#", "data:image/webp;base64,")) for link, _ in references)
    assert len(references) > 5
    assert "http://" not in page
    assert "https://" not in page


def test_every_anchor_exists(page: str) -> None:
    anchors = set(re.findall(r'href="#([^"]+)"', page))
    assert anchors == {
        "lissa-tab3-embedded",
        "lissa-fig1-embedded",
        "lissa-fig1-laptop",
        "zeta-fig9-embedded",
        "zeta-fig10-embedded",
    }
    assert all(f'id="{anchor}"' in page for anchor in anchors)


def test_page_shows_claims_numbers_and_provenance(page: str) -> None:
    for text in (
        "Influence by CG and the exact PBRF lie on the line x = y.",
        "0.9 [0.8, 0.95] (t 95 %, 3 seeds)",
        "at least 0.99 (direction: at least 0.5)",
        "See fig1/laptop: batch noise.",
        "Needs ImageNet, which the embedded preset has not.",
        "make lissa-fig1 PRESET=laptop ARGS=",
        "0123456789abcdef0123456789abcdef01234567 (tree: clean)",
        "(tree: with changes)",
        "45 min 12 s",
        "1,434 MiB",
        "CIFAR-10 instead of ImageNet",
        "1281167",
        "first 12 of 40 rows; all are in table.csv",
        "num_train_points",  # the paper's own setting of Fig. 1
        "frobenius_norm",  # and of Table 3
    ):
        assert text in page


def test_everything_is_escaped(page: str) -> None:
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; more." in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page


def test_smoke_and_variations_are_left_out(page: str) -> None:
    assert "must not be shown" not in page


def test_no_path_of_the_machine(results: Path) -> None:
    (results / "lissa/fig1/laptop/claims.json").write_text("{")
    report = build_report(results)
    assert str(results.parent) not in report.page.read_text() + report.scoreboard.read_text()


def test_same_results_give_the_same_bytes(results: Path) -> None:
    first = build_report(results).page.read_bytes()
    assert build_report(results).page.read_bytes() == first


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("claims.json", b"{", "is damaged"),
        ("claims.json", None, "is missing"),
        ("run.json", b"{", "is damaged"),
        ("run.json", b"[]", "is damaged"),
        ("run.json", None, "is missing"),
        ("table.csv", b"", "is damaged"),
        ("table.csv", b'a,b\n"1', "is damaged"),
        ("table.csv", b"\xff\xfe\x00", "is damaged"),
        ("table.csv", None, "is missing"),
        ("figure.png", b"no image", "is damaged"),
        ("figure.png", "cut", "is damaged"),
    ],
)
def test_damaged_file_is_named_and_the_rest_is_shown(
    results: Path, name: str, content: bytes | str | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = results / "lissa/fig1/laptop" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:2000] if content == "cut" else content)
    assert main(["--results", str(results)]) == 0
    warning = capsys.readouterr().err
    assert re.search(rf"results/lissa/fig1/laptop/{name} {problem}", warning)
    assert "run `make lissa-fig1 PRESET=laptop` again" in warning
    page = (results / "index.html").read_text(encoding="utf-8")
    assert page.count(f"results/lissa/fig1/laptop/{name} {problem}") == 2  # at the top and in its section
    assert "Needs ImageNet, which the embedded preset has not." in page


def test_run_json_may_be_nearly_empty(results: Path) -> None:
    (results / "lissa/fig1/laptop/run.json").write_text('{"scale": 3, "config": null, "clean": null}')
    page = build_report(results).page.read_text(encoding="utf-8")
    assert "unknown (tree: unknown)" in page
    assert "make lissa-fig1 PRESET=laptop</pre>" in page


def test_summary_is_shown_instead_of_the_table(results: Path) -> None:
    (results / "lissa/fig1/laptop/summary.csv").write_text("model,pearson\nresnet20,0.9876543\n")
    page = build_report(results).page.read_text(encoding="utf-8")
    assert "results/lissa/fig1/laptop/summary.csv" in page
    assert "<td>0.9877</td>" in page


def test_command_line(results: Path) -> None:
    def run(folder: str) -> subprocess.CompletedProcess[str]:
        # the warning would mean that the package imports the module that -m is about to run
        command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "curvlab.reporting.report"]
        command += ["--results", folder]
        return subprocess.run(
            command, cwd=results.parent, capture_output=True, text=True, check=False, timeout=120
        )

    done = run("results")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("results/index.html (")
    missing = run("nowhere")
    assert missing.returncode == 2
    assert "make a target first" in missing.stderr


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome here")
@pytest.mark.parametrize("width", [360, 1280])
def test_browser_shows_no_horizontal_scrolling(page: str, tmp_path: Path, width: int) -> None:
    (tmp_path / "probed.html").write_text(page.replace("</body>", PROBE), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --hide-scrollbars"
    flags += f" --user-data-dir={tmp_path / 'profile'} --window-size=1400,900 --virtual-time-budget=5000"
    command = [str(BROWSER), *flags.split(), "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = {name: int(number) for name, number in re.findall(r'data-(\w+)="(\d+)"', done.stdout)}
    assert found["window"] == width
    assert found["content"] <= width
    assert found["images"] == 5
    assert found["shown"] == 1  # the filter leaves the one claim that is not reproduced

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page is shown in a frame, since a headless window is never narrower than 500 px; the frame's findings
# travel up as a message and end in the attributes that --dump-dom prints.
PROBE = """<script>
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  document.querySelectorAll("img").forEach((image) => { image.loading = "eager"; });
  const form = document.getElementById("filters");
  if (form) {
    form.elements.verdict.value = "not reproduced";
    form.dispatchEvent(new Event("change"));
  }
  const rows = [...document.querySelectorAll(".scoreboard tbody tr")];
  parent.postMessage({
    window: window.innerWidth,
    content: document.documentElement.scrollWidth,
    images: [...document.images].filter((image) => image.complete && image.naturalWidth > 0).length,
    claims: rows.filter((row) => row.offsetHeight > 0).length,
  }, "*");
});
</script></body>"""
FRAME = """<!DOCTYPE html><html><body><script>
window.addEventListener("message", (event) => Object.assign(document.documentElement.dataset, event.data));
</script><iframe src="probed.html" style="border: 0; width: {width}px; height: 800px"></iframe></body></html>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome here")
@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize(("shown", "images"), [("index.html", 0), ("lissa/index.html", 3), ("single.html", 5)])
def test_browser_shows_no_horizontal_scrolling(
    page: str, whole: Path, tmp_path: Path, shown: str, images: int, width: int
) -> None:
    tmp_path = Path(shutil.copytree(whole, tmp_path / "results"))
    (tmp_path / "single.html").write_text(page, encoding="utf-8")
    text = (tmp_path / shown).read_text(encoding="utf-8")
    frame = (tmp_path / shown).with_name("frame.html")
    frame.with_name("probed.html").write_text(text.replace("</body>", PROBE), encoding="utf-8")
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --hide-scrollbars"
    flags += f" --user-data-dir={tmp_path / 'profile'} --window-size=1400,900 --virtual-time-budget=5000"
    command = [str(BROWSER), *flags.split(), "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = {name: int(number) for name, number in re.findall(r'data-(\w+)="(\d+)"', done.stdout)}
    assert found["window"] == width
    assert found["content"] <= width
    assert found["images"] == images
    if shown != "lissa/index.html":
        assert found["claims"] == 1  # the filter leaves the one claim that is not reproduced

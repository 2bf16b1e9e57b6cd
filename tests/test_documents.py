"""What README and docs say in Python runs as it stands, block after block, with the numbers that they assert."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["README.md", "docs/library.md", "docs/howto.md"])
def test_the_blocks_of_a_document_run(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    (tmp_path / "blocks.py").write_text("\n".join(blocks))
    found = runpy.run_path(str(tmp_path / "blocks.py"))
    if name == "docs/howto.md":
        assert found["result"].scores.shape == (100, 300)
        return
    assert 10 < found["llc"].value < 40
    assert 0.3 < float(found["largest"].values[0]) < 0.7


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_the_links_of_a_document_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        assert link.startswith("http") or ((ROOT / name).parent / link).exists(), link


def test_the_readme_is_short_and_begins_with_its_picture() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    assert len(readme.split()) <= 1500
    assert "![" in "".join(readme.splitlines()[:25])

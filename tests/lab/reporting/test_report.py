import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab.reporting.claims import VERDICTS
from curvlab.lab.reporting.report import (
    Headline,
    build_report,
    findings,
    load_headlines,
    main,
    scoreboard,
    verdict_counts,
    write_scoreboard,
)
from curvlab.lab.reporting.results import read_results

ROOT = Path(__file__).parents[3]


def references(page: str) -> set[str]:
    found = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)|@import""", page)
    return {link for link, _ in found}


def test_pages_link_only_what_lies_beside_them(whole: Path) -> None:
    pages = [whole / "index.html", *sorted(whole.glob("*/index.html"))]
    assert [path.parent.name for path in pages] == ["results", "lissa", "zeta"]
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in pages}
    assert {"scoreboard.csv", "zeta/index.html#paper-zeta"} <= references(texts[pages[0]])
    assert {"fig1/laptop/figure.png", "fig1/laptop/table.csv", "fig1/laptop/run.json"} <= references(
        texts[pages[1]]
    )
    for path, text in texts.items():
        for link in references(text):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.is_file(), link
            assert not anchor or f' id="{anchor}"' in texts[target], link
        assert "http://" not in text
        assert "https://" not in text
        assert len(text) < 50_000


def test_single_file_needs_no_other_file(results: Path, tmp_path: Path) -> None:
    report = build_report(results, single_file=tmp_path / "mail" / "page.html")
    assert report.page == tmp_path / "mail" / "page.html"
    assert report.pages == ()
    assert list(results.rglob("index.html")) == []
    links = references(report.page.read_text(encoding="utf-8"))
    assert all(link.startswith(("#", "data:image/webp;base64,")) for link in links)
    assert sum(link.startswith("data:") for link in links) > 0
    with pytest.raises(ValueError, match=r"page\.html would lie inside results/, whose files are published"):
        build_report(results, single_file=results / "lissa" / "page.html")


def test_every_anchor_exists_once(page: str) -> None:
    anchors = {link[1:] for link in references(page) if link.startswith("#")}
    identities = re.findall(r' id="([^"]+)"', page)
    assert {
        "lissa-fig1-laptop-exact-correlates",
        "zeta-fig9-embedded-theorem",
        "paper-lissa",
        "scoreboard",
    } <= anchors
    assert anchors <= set(identities)
    assert len(identities) == len(set(identities))


def test_papers_come_first_targets_next_the_scoreboard_last(page: str) -> None:
    places = [
        page.index(text)
        for text in (
            'id="found"',
            "LiSSA gives the PBRF &lt;in time&gt;.",
            "Enough steps.",
            'id="paper-lissa"',
            'id="lissa-fig1-laptop"',
            'id="paper-zeta"',
            'id="scoreboard"',
        )
    ]
    assert places == sorted(places)


def test_first_page_has_headlines_and_scoreboard_alone(first: str) -> None:
    assert first.index('id="found"') < first.index('id="scoreboard"')
    assert "Enough steps." in first
    assert 'href="lissa/index.html#lissa-fig1-laptop-steps-enough">steps-enough</a>' in first
    assert 'id="paper-lissa"' not in first


def test_headlines_show_what_was_found(page: str) -> None:
    overview = page[page.index('id="found"') : page.index('id="paper-lissa"')]
    sentence, steps, nobody = overview.split("<li>")[1:]
    found = re.findall(r'([a-z ]+)</span> <a href="#([^"]+)">([^<]+)</a>', sentence)
    assert found == [
        ("reproduced", "lissa-tab3-embedded-exact-correlates", "exact-correlates"),
        ("direction only", "lissa-fig1-embedded-exact-correlates", "exact-correlates"),
        ("reproduced", "lissa-fig1-laptop-exact-correlates", "exact-correlates"),
    ]
    assert steps.count("steps-enough</a>") == 2  # at both presets
    assert "no result yet" in nobody
    assert "Not a word of this" not in page  # a paper without results is absent


def test_verdicts_are_counted_and_explained(page: str) -> None:
    header = page[: page.index("</header>")]
    counts = re.findall(r">([a-z ]+)</span> <strong>(\d+)</strong></dt><dd>([^<]+)</dd>", header)
    assert [(verdict, int(count)) for verdict, count, _ in counts] == [
        ("reproduced", 4),
        ("direction only", 1),
        ("undecided", 1),
        ("not reproduced", 1),
        ("refuted", 1),
        ("out of reach", 1),
    ]


@pytest.mark.parametrize("verdict", VERDICTS)
def test_badges_have_enough_contrast(page: str, verdict: str) -> None:
    def luminance(name: str) -> float:
        colour = re.search(rf"--{name}: #([0-9a-f]{{6}})", page)[1]
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    name = verdict.replace(" ", "-")
    darker, lighter = sorted((luminance(name), luminance(f"{name}-back")))
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5  # WCAG AA for small text
    assert f'class="badge {name}"' in page


def test_page_shows_claims_numbers_and_provenance(page: str) -> None:
    for text in (
        "Influence by CG and the exact PBRF lie on the line x = y.",
        "0.9 [0.8, 0.95] (t 95 %, 3 seeds)",
        "at least 0.99 (direction: at least 0.5)",
        "See fig1/laptop: batch noise.",
        "Needs ImageNet, which the embedded preset has not.",
        "make lissa-fig1 PRESET=laptop ARGS=",
        "<dt>computed by</dt><dd>41 units from 01234567, 3 from fedcba98 with changes</dd>",
        "<dt>computed by</dt><dd>commits not recorded</dd>",
        "<dt>judged by</dt><dd>01234567</dd>",
        "<dt>drawn by</dt><dd>fedcba98 with changes</dd>",
        "<td>training images</td><td>4998, 500</td><td>1281167</td>",
        "Counter-example: H = diag(1, -1).",
        "criterion changed on 2026-11-20: bound &lt;1&gt; instead of 0.9",
        "45 min 12 s",
        "1,434 MiB",
        "CIFAR-10 instead of ImageNet",
        "first 5 of 40 rows",
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
    for path in (report.page, *report.pages, report.scoreboard):
        assert str(results.parent) not in path.read_text(encoding="utf-8")


def test_same_results_give_the_same_bytes(results: Path, whole: Path) -> None:
    again = build_report(results, papers=whole.parent / "papers")
    for path in (again.page, *again.pages):
        assert path.read_bytes() == (whole / path.relative_to(results)).read_bytes()
    assert again.scoreboard.read_bytes() == (whole / "scoreboard.csv").read_bytes()


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
    for path in (results / "index.html", results / "lissa" / "index.html"):
        assert path.read_text(encoding="utf-8").count(f"results/lissa/fig1/laptop/{name} {problem}") == 1
    assert "Needs ImageNet, which the embedded preset has not." in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["{}", '{"units": null, "config": null, "title": null, "seeds": {"a": [1]}}'])
def test_run_json_may_be_nearly_empty(results: Path, content: str) -> None:
    (results / "lissa/fig1/laptop/run.json").write_text(content)
    page = build_report(results).pages[0].read_text(encoding="utf-8")
    assert "commits not recorded" in page[page.index('id="lissa-fig1-laptop"') :]
    assert "make lissa-fig1 PRESET=laptop</pre>" in page


def test_damaged_headlines_are_named(results: Path, tmp_path: Path) -> None:
    (tmp_path / "headlines.yaml").write_text("lissa: 3")
    assert "headlines.yaml is damaged" in build_report(results, papers=tmp_path).problems[0]


def test_summary_is_shown_instead_of_the_table(results: Path) -> None:
    (results / "lissa/fig1/laptop/summary.csv").write_text("model,pearson\nresnet20,0.9876543\n")
    page = build_report(results).pages[0].read_text(encoding="utf-8")
    assert 'href="fig1/laptop/summary.csv"' in page
    assert "<td>0.9877</td>" in page


def test_command_line(results: Path) -> None:
    def run(folder: str) -> subprocess.CompletedProcess[str]:
        # the warning would mean that the package imports the module that -m is about to run
        command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "curvlab.lab.reporting.report"]
        command += ["--results", folder]
        return subprocess.run(
            command, cwd=results.parent, capture_output=True, text=True, check=False, timeout=120
        )

    done = run("results")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("results/index.html (")


def test_command_line_says_what_to_change(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--results", str(tmp_path / "nowhere")], "make a target first"),
        (["--results", str(results), "--single-file", str(results / "a.html")], "choose a path outside it"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert main(["--results", str(results), "--single-file", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path.as_posix()}/a.html (")


# ------------------------------------------------------------------------------------ headlines
ROOT = Path(__file__).parents[3]


def test_findings_by_preset(results: Path) -> None:
    folders = read_results(results)
    found = findings(Headline("", ("lissa/fig1/exact-*", "lissa/tab3/exact-correlates")), folders)
    assert [(each.preset, dict(each.verdicts)) for each in found] == [
        ("embedded", {"reproduced": 1, "direction only": 1}),
        ("laptop", {"reproduced": 1}),
    ]
    assert [folder.key for folder, _ in found[0].results] == ["lissa/tab3", "lissa/fig1"]
    assert findings(Headline("", ("lissa/fig1/exact",)), folders) == ()  # without a star the whole name counts


def test_every_headline_names_claims_that_are_published_or_written_down() -> None:
    folders = read_results(ROOT / "results")
    published = {folder.paper for folder in folders}
    for paper, headlines in load_headlines(ROOT / "experiments" / "papers").items():
        for headline in headlines:
            for claim in headline.claims:
                found = findings(Headline("", (claim,)), folders) or _written_down(claim)
                assert paper not in published or found, claim


def _written_down(claim: str) -> bool:
    """Whether the target's claims.yaml has it: its results may not have been computed since."""
    folder, _, name = claim.rpartition("/")
    return f"\n  {name.removesuffix('-*')}:\n" in (ROOT / "experiments" / folder / "claims.yaml").read_text()


def test_no_file_no_headlines(tmp_path: Path) -> None:
    assert load_headlines(tmp_path) == {}


@pytest.mark.parametrize(
    "content", ["[", "lissa: 3", "lissa: [{says: x}]", "lissa: [{says: x, claims: 3}]", "- a"]
)
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "headlines.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"headlines\.yaml is damaged .*needs a list of `says` and `claims`"):
        load_headlines(tmp_path)


# ------------------------------------------------------------------------------------ scoreboard
def test_one_row_per_claim_and_preset_in_order(results: Path) -> None:
    board = scoreboard(read_results(results))
    assert list(zip(board["target"], board["preset"], board["claim"], strict=True)) == [
        ("lissa-tab3", "embedded", "exact-correlates"),
        ("lissa-fig1", "embedded", "exact-correlates"),
        ("lissa-fig1", "embedded", "steps-enough"),
        ("lissa-fig1", "laptop", "exact-correlates"),
        ("lissa-fig1", "laptop", "steps-enough"),
        ("zeta-fig9", "embedded", "exact-correlates"),  # numbers sort as numbers
        ("zeta-fig9", "embedded", "steps-rest"),
        ("zeta-fig9", "embedded", "theorem"),
        ("zeta-fig10", "embedded", "exact-correlates"),
    ]
    assert verdict_counts(board) == {
        "reproduced": 4,
        "direction only": 1,
        "undecided": 1,
        "not reproduced": 1,
        "refuted": 1,
        "out of reach": 1,
    }


def test_written_rows_carry_value_interval_and_commits(results: Path) -> None:
    path = write_scoreboard(scoreboard(read_results(results)), results)
    board = pd.read_csv(path).set_index(["target", "preset", "claim"])
    row = board.loc[("lissa-fig1", "laptop", "exact-correlates")]
    assert (row["value"], row["low"], row["high"]) == (0.998, 0.995, 0.999)
    assert row["interval"] == "bootstrap 95 %, 25 points"
    assert row["paper_value"] == "points along x = y"
    assert row["units"] == "41 units from 01234567, 3 from fedcba98 with changes"
    assert board.loc[("lissa-fig1", "embedded", "steps-enough"), "units"] == "commits not recorded"
    assert "Measured" not in path.read_text()  # explanations stand in claims.json


def test_empty_results(tmp_path: Path) -> None:
    assert list(verdict_counts(scoreboard(read_results(tmp_path))).values()) == [0] * 6

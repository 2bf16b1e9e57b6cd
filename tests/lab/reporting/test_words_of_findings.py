"""What findings say in words: numbers and sizes that no reference shows are those of the claims."""

from __future__ import annotations

import json
import re

from curvlab.lab.claims.claims import DIRECTION_ONLY, NOT_ASKED, NOT_REPRODUCED, REFUTED, REPRODUCED, UNDECIDED
from curvlab.lab.reporting.findings import HEADLINES, best_claims
from curvlab.lab.reporting.results import read_results
from curvlab.lab.tables import read_table
from curvlab.lab.targets.target import PRESETS, ROOT


def test_number_words_of_findings_are_those_of_the_claims() -> None:
    told = " ".join(HEADLINES.read_text(encoding="utf-8").split())
    claims = best_claims(read_results(ROOT / "results"))
    at = {(own.key, own.preset): own.claims for own in read_results(ROOT / "results")}
    length = {own.claim.id: own for own in at["pbrf/tab7", "laptop"] if own.claim.id.startswith("own-length-")}
    concrete, wider = (length[f"own-length-mlp-128-128-{name}"] for name in ("concrete", "energy"))
    assert [each.interval.num_samples for each in (concrete, wider)] == [20, 20]
    assert (concrete.verdict, wider.verdict) == (NOT_REPRODUCED, DIRECTION_ONLY)
    assert wider.value < claims["pbrf/tab6/own-length-mlp-128-128-energy"].value - 0.1
    longer = claims["pbrf/tab6/own-length-mlp-128-128-mnist-6000-faster"].interval
    assert longer.low < 0.9 < longer.high
    assert "On MNIST, at a rate whose PBRF is as long, it is open; with the Hessian farther on Concrete" in told
    energy = claims["pbrf/tab5/answers-another-question-mlp-128-128-energy"]
    assert energy.value < float(energy.claim.words["zero"]) < 2 * energy.value
    assert "but predicting no change would have less than twice that" in told
    tab8 = (at["pbrf/tab8", preset] for preset in ("laptop", "paper"))
    laptop, paper = ({each.claim.id.removesuffix("-mlp-128-128-energy"): each for each in own} for own in tab8)
    slow = [of["slow-two-stages"] for of in (paper, laptop)]
    assert [each.interval.num_samples for each in slow] == [8, 20]
    assert all(each.interval.low > 0 for each in slow)
    assert all(of["sign-kept"].value > 0.7 and of["sign-lost"].value < -0.7 for of in (paper, laptop))
    assert all(abs(of["two-stages"].value) < 0.2 for of in (paper, laptop))
    assert (
        "at the PBRF's learning rate, hardly at the training's. At the former it does more than warm start" in told
    )

    def verdicts(start: str) -> list[str]:
        return [each.verdict for name, each in claims.items() if name.startswith(start)]

    folders = [own for own in read_results(ROOT / "results") if own.preset == "laptop"]
    figures = [own for own in folders if own.key in ("lissa/fig1", "lissa/fig2")]
    batch = {each.claim.id: each for own in figures for each in own.claims}
    batch = {name: each for name, each in batch.items() if re.match("(recipe-)?converges-", name)}
    worst, fitted = (batch[f"converges-mlp-64-{of}"] for of in ("64-mnist-6000-early", "tanh-mnist-2000"))
    assert 0.75 < worst.value < worst.claim.criterion.at_least
    assert abs(fitted.value - worst.value) < 0.05
    early = [name for name in batch if "-early" in name]
    assert [batch[name].verdict for name in early if name != worst.claim.id] == [REPRODUCED, REPRODUCED]
    assert len(early) == 3
    others = [each for name, each in batch.items() if name not in early and each != fitted]
    assert max(each.value for each in others) < 0.2
    assert "On three networks stopped early LiSSA" in told
    assert "on converged ones it fails, but for one that fits its data in part" in told
    scores = [
        each.verdict for name, each in claims.items() if re.match("ginger/tab2/.*-above-|ginger/tab2/qng-", name)
    ]
    assert {NOT_ASKED} == {*scores}
    with_lora = {
        preset: next(
            each for each in at["ginger/tab2", preset] if each.claim.id.startswith("curvature-works-lora")
        )
        for preset in ("laptop", "embedded")
    }
    assert (with_lora["laptop"].verdict, with_lora["embedded"].verdict) == (NOT_REPRODUCED, REPRODUCED)
    assert "with LoRA two runs disagree" in told
    fine_tuned = read_table(ROOT / "results/ginger/tab2/laptop", "table")
    start = read_table(ROOT / "results/ginger/tab2/laptop", "start")
    means = fine_tuned.groupby(["weights", "racer", "rank"], dropna=False).rouge.mean()
    assert means.max() < start.rouge[0]
    assert "fine-tuning lowers ROUGE" in told
    raced = read_table(ROOT / "results/ginger/tab1/laptop", "table").query("task == 'mlp-fashion-mnist'")
    of_best = raced.query("rank == 1 and racer == 'ginger_published' or racer == 'without_curvature'")
    least = of_best.pivot(index="seed", columns="racer", values="min_train_loss")
    assert (int((least.without_curvature < least.ginger_published).sum()), len(least)) == (5, 10)
    assert "Without curvature it is lower in half" in told
    accuracy = 100 * raced.groupby(["racer", "rank"]).test_accuracy.mean()
    by_rank = accuracy["ginger_published"]
    assert abs(by_rank[1] - accuracy["without_curvature", 4]) < 0.05
    assert "published Ginger at the rank where it was tuned, level at its smallest" in told
    assert claims["ginger/tab1/published-above-qng-mlp-fashion-mnist"].verdict == NOT_REPRODUCED
    assert claims["ginger/tab1/published-above-momentum-mlp-fashion-mnist"].weighed == UNDECIDED
    assert claims["ginger/tab1/published-rank-saturates-mlp-fashion-mnist"].weighed == UNDECIDED
    assert "points below Adam's, and below QNG's; to momentum the order is open" in told
    assert "Whether it saturates is open" in told
    assert claims["lissa/thm1/second-moment-bound-any-start"].verdict == REFUTED
    assert "Started elsewhere Theorem 1 can fail" in told
    floors = "sweep == 'epsilon' and task == 'ffnn-64-mnist-10000'"
    by_floor = read_table(ROOT / "results/ngd/fig3/laptop", "summary").query(floors).set_index("value").llc
    assert by_floor[1e-6] > 0.99 * by_floor[1e-10]
    assert by_floor[1e-4] < 0.5 * by_floor[1e-6]
    rises = claims["ngd/fig3/llc-never-rises-with-epsilon-ffnn-64-mnist-10000"]
    assert rises.interval.low > 1
    assert rises.value < 1.15
    assert "past a certain size, where the LLC more than halves and then rises a little" in told
    assert set(verdicts("ngd/fig7/llc-increases-sgd")) == {UNDECIDED}
    tuning = read_table(ROOT / "results/ngd/fig1/laptop", "tuning").query(
        "chosen and task.str.contains('1-layer')"
    )
    config = json.loads((ROOT / "results/ngd/fig1/laptop/run.json").read_text())["config"]
    assert set(tuning.lr) == {config["optimizers"]["sgd"]["lr"]} == {config["optimizers"]["ngd"]["lr"]}
    assert "with one hidden layer the tuned one, too" in told
    higher = claims["ngd/fig5/llc-plateaus-higher-ffnn-128-128-mnist-10000"]
    assert re.search(r"From each rate to the next: ngd-middle \+.*, ngd-high -", higher.explanation)
    assert higher.value < 0
    assert "on fewer images ten times its largest rate ends below that rate" in told.lower()
    assert "No plateau is reached" in claims["ngd/fig5/llc-plateaus-higher-ffnn-256-256-mnist"].explanation
    assert claims["lissa/tab1/constant-two-saturated"].value > 2 * 10
    assert "C = 2, that fitted networks exceed by an order of magnitude" in told
    fail = [
        (own.key, each.claim.id)
        for own in read_results(ROOT / "results")
        if own.paper == "lissa" and own.preset == "laptop"
        for each in own.claims
        if each.verdict == NOT_REPRODUCED and each.claim.source.startswith("Klochkov")
    ]
    of_two = ("fig1/", "fig2/", "fig4/", "tab1/constant", "thm1/constant")
    assert (
        sum(f"{key}/{claim}".startswith(tuple(f"lissa/{of}" for of in of_two)) for key, claim in fail)
        > len(fail) / 2
    )
    assert "Most claims that fail are this one fact" in told


SIZES = {  # what is said without a number, and what it stands on
    "Two suffices for two networks stopped early": "1"
    " == fig1/recipe-converges-mlp-64-64-mnist-early-curvature-3000"
    " == fig1/recipe-converges-resnet20-cifar10-early-curvature-200",
    "on an MNIST MLP stopped early they agree": "fig1/agreement-mlp-64-64-mnist-early-curvature-3000 > 0.9",
    "on Concrete by all of it": "0.9 < tab5/influence-is-the-pbrf-mlp-128-128-concrete < 1.15",
    "On an autoencoder it is less than a quarter": "tab5/influence-is-the-pbrf-autoencoder-mnist-1000 < 0.25",
    "with the C assumed, one sequence is enough for a small OPT": "tab1/one-sequence < 256",
    "several times what the paper calls mild": "tab1/requirement-mild-measured > 3 * 200",
    "more than warm start": "tab8/slow-above-warm-start-mlp-128-128-energy > 0.2",
    "A rewording stands out more": "fig3/stands-out-more > 3",
    "far less when solved to the end": "tab6/exact-mlp-128-128-energy < tab6/own-length-mlp-128-128-energy - 0.3",
    "The smallest scaling does worse": "tab6/smallest-scaling-mlp-128-128-energy"
    " < tab6/pbrf-mlp-128-128-energy - 0.1",
    "on MNIST, whose PBRF is shorter, its rank correlation is lower than the paper's": "0.8"
    " > tab6/pbrf-ranks-mlp-128-128-mnist-6000",
    "rounds to the paper's zero on Pima": "tab5/no-gaps-logistic-pima-diabetes < 0.001",
    "hardly at the training's": "abs(tab8/two-stages-mlp-128-128-energy) < 0.2",
    "on Energy. That is a larger gap than the paper's": "tab8/slow-below-pbrf-mlp-128-128-energy > 0.33",
    "Influence solved exactly hardly correlates with it on either": "tab7/exact-mlp-128-128-energy"
    " < 0.2 > tab7/exact-mlp-128-128-concrete",
    "over points, small MNIST sets agree with it": "tab6/over-points-mlp-128-128-mnist-600"
    " > 0.5 < tab6/over-points-mlp-128-128-mnist-6000",
    "When most of Concrete is removed": "fig5/small-at-every-level-removed-mlp-128-128-concrete > 0.4",
    "as much as those of predicting no change": "abs(0.47"
    " - fig5/small-at-every-level-removed-mlp-128-128-concrete) < 0.01",
    "each far from its own exact value": "fig1/agreement-mlp-8-tanh-cifar10 < 0.5",
    "on digits it does not": "fig5/llc-rises-faster-ffnn-32-32-digits < 0",
    "Once they are fitted it holds fewer": "fig6/influence-finds-most-mlp-128-128-mnist-600-overfitted"
    " < fig6/influence-finds-most-mlp-128-128-mnist-600 - 0.1",
    "From the trained weights it is no better": "tab6/warm-mlp-128-128-energy"
    " < tab6/cold-mlp-128-128-energy + 0.1",
    "slightly below with all weights": "0 < tab2/published-perplexity-below-adam-full-t5-32-documentation < 0.02",
    "curvature lowers perplexity slightly with all weights": "0"
    " < tab2/curvature-works-full-t5-32-documentation < 0.01",
    "below Adam's and QNG's in every seed": "1 == tab1/training-loss-published-below-adam-mlp-fashion-mnist"
    " == tab1/training-loss-published-below-qng-mlp-fashion-mnist",
    "the last epoch's mean is higher than Adam's and QNG's": "1"
    " < tab1/training-loss-last-epoch-published-mlp-fashion-mnist",
    "on a ResNet never below Adam's": "0 == tab1/training-loss-published-below-adam-resnet20-stage-cifar100",
    "On a ResNet's stage it is below that of all three": "0 > max("
    "tab1/published-above-adam-resnet20-stage-cifar100, tab1/published-above-qng-resnet20-stage-cifar100,"
    " tab1/published-above-momentum-resnet20-stage-cifar100)",
    "accuracy falls with its rank": "tab1/published-rank-helps-mlp-fashion-mnist < -0.3",
    "those of LiSSA not at all": "abs(appg/step-independent-of-n-mlp-128-128-mnist-6000) < 0.01",
    "about as much with two": "abs(fig1/llc-higher-ffnn-2-layers-mnist-10000"
    " - fig1/llc-higher-ffnn-1-layer-mnist-10000) < 0.1",
    "an epoch, SGD's by less": "fig4/llc-rises-faster-ffnn-256-256-fashion-mnist > 0",
    "unrescaled they are far shorter than SGD's": "fig4/update-norm-steady-ffnn-256-256-fashion-mnist < 0.1",
    "on Concrete by less than in the paper": "tab7/pbrf-mlp-128-128-concrete < 0.85",
    "for indefinite H, with the largest eigenvalue as λmax, too small": "prop/largest-eigenvalue > 1",
}


def test_words_of_size_are_those_of_the_claims() -> None:
    told = " ".join(HEADLINES.read_text(encoding="utf-8").split())
    values: dict[str, float] = {}
    for own in sorted(read_results(ROOT / "results"), key=lambda own: PRESETS.index(own.preset)):
        values |= {f"{own.key.split('/')[1]}/{each.claim.id}": each.value for each in own.claims}
    for words, fact in SIZES.items():
        assert words in told, words
        holds = re.sub(r"[a-z0-9]+/[a-z0-9-]+[a-z0-9]", lambda name: repr(values[name[0]]), fact)
        assert eval(holds), f"{words}: {fact}"  # noqa: S307 (the table above)

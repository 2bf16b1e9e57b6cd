"""Similarity of 20 sentences by gradients and by influence (Klochkov & Liu 2024, Sec. 5, Fig. 3, App. A).

make lissa-fig3 PRESET=smoke|embedded|laptop|paper ARGS="damping_ratio=0.05 model_seeds=[0,1,2,3]"

Ten facts, each written twice (experiments/papers/lissa/sentences.csv). For several trained models: the cosines of
the gradients of the sentences' losses, the same through (G + damping)⁻¹, and their difference, with the means of
its 10 × 10 squares; then how well each of them picks a sentence's other wording out of ten.

Where we differ from the paper: models trained here; `damping` is the paper's share of lambda_max, 5 / 780;
the systems are solved by block CG to a residual of `solver.rtol`, and LiSSA, with the paper's settings at our
scale (step_size · lambda_max, steps, sequences in a batch), is compared with that on `lissa_check.sentences` of
them. Of the caption's step size 0.003 two readings are run: as printed it is 2.3 / lambda_max, above
2 / lambda_max; as the `lr` of the authors' code, which is step size times damping (for damping > 1), it is 6e-4 =
0.47 / lambda_max.

The caption calls the right heat map "the difference between the former and the latter" (influence, gradient), the
text says that its values are positive because gradient similarity is higher: it is gradient - influence.
The squares' standard errors treat their 100 values as independent, as the paper does; 20 sentences are fewer, so
intervals of claims are over trained models, or over facts (jackknife) where there is one model.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab import runs
from curvlab.reporting import load_paper_numbers, save_claims
from experiments.language_task import build_language_task, perplexities
from experiments.lissa import fig3_statistics as statistics
from experiments.lissa.fig3_claims import judge_claims
from experiments.lissa.fig3_plot import draw
from experiments.lissa.fig3_scores import LissaCheck, Measured, check_lissa, measure
from experiments.papers import FOLDER as PAPERS

SENTENCES = PAPERS / "lissa" / "sentences.csv"


@runs.main("lissa/fig3_sentence_similarity")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(
        cfg, paper="lissa", item="fig3", title="Similarity of sentences by gradient and influence"
    ) as run:
        sentences = pd.read_csv(SENTENCES)
        measured: list[Measured] = []
        checks: list[LissaCheck] = []
        for seed in cfg.model_seeds:
            part = OmegaConf.merge(cfg, {"model_seed": seed})
            assert isinstance(part, DictConfig)
            task = build_language_task(run, part)
            found = measure(run, task, part, sentences.text.tolist(), perplexities(run, task))
            measured.append(found)
            if seed == cfg.model_seeds[0] and cfg.lissa_check is not None:
                checks += check_lissa(run, task, part, sentences.text.tolist(), found)
        # Read back what was written, six digits: everything below can be had from the file alone.
        table = pd.read_csv(run.save_table(statistics.pair_table(measured, sentences)))
        squares = pd.read_csv(run.save_table(statistics.square_table(table), "squares.csv"))
        retrieval = pd.read_csv(run.save_table(statistics.retrieval_table(table), "retrieval.csv"))
        run.save_table(_summary(measured), "summary.csv")
        lissa = pd.DataFrame([vars(check) for check in checks])
        if len(lissa):
            run.save_table(lissa, "lissa.csv")
        save_claims(run.folder, judge_claims(table, retrieval, lissa))
        for name, figure in draw(table, squares, retrieval).items():
            run.save_figure(figure, name)
        run.note(scale=_scale(cfg, measured), seeds=list(cfg.model_seeds))


def _summary(measured: list[Measured]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "model seed": m.model_seed,
            "parameters": m.num_parameters,
            "perplexity, train": m.perplexity["train"],
            "perplexity, test": m.perplexity["test"],
            "perplexity, sentences": m.sentence_perplexity,
            "tokens a sentence": m.tokens_per_sentence,
            "lambda_max": m.largest_eigenvalue,
            "damping": m.damping,
            "largest residual": m.residual,
            "asymmetry": m.asymmetry,
            "matrix-vector products": m.num_matvecs,
        }
        for m in measured
    )


def _scale(cfg: DictConfig, measured: list[Measured]) -> dict[str, Any]:
    paper = load_paper_numbers("lissa", folder=PAPERS)
    printed = {
        name: paper.get("Fig. 3", "all", name).value
        for name in ("damping", "num_steps", "batch_size", "context_length")
    }
    return {
        "model": {"ours": f"{cfg.name}, {measured[0].num_parameters:.3g} parameters", "paper": "OPT 1.3B"},
        "trained models": {"ours": len(measured), "paper": 1},
        "sentences": {"ours": 20, "paper": 20},
        "damping": {"ours": [round(m.damping, 6) for m in measured], "paper": printed["damping"]},
        "tokens in a sequence": {"ours": cfg.sequence_length, "paper": printed["context_length"]},
        "sequences of the curvature": {
            "ours": measured[0].num_sequences,
            "paper": f"{printed['batch_size']:g} a step, {printed['num_steps']:g} steps",
        },
        "solver": {"ours": str(cfg.solver._target_).rsplit(".", 1)[-1], "paper": "LiSSA"},
    }


if __name__ == "__main__":
    main()

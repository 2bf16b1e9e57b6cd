"""ROUGE (Lin 2004) by the package rouge-score: how many words and pairs of words two texts share."""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("rouge1", "rouge2", "rougeL")


def rouge(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F measures of ROUGE-1, ROUGE-2 and ROUGE-L in percent, with Porter's stemmer.

    ROUGE-1 and -2 count shared words and pairs of neighbours, ROUGE-L the longest common subsequence of words.

    Args:
        summaries: written by a model.
        references: written by people, in the same order.
    """
    from rouge_score.rouge_scorer import RougeScorer

    if not references or len(summaries) != len(references):
        raise ValueError(f"there are {len(summaries)} summaries for {len(references)} references: one for each")
    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    found = [scorer.score(reference, own) for reference, own in zip(references, summaries, strict=True)]
    return {kind: 100 * sum(scores[kind].fmeasure for scores in found) / len(found) for kind in KINDS}

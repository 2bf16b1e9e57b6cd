"""Real data sets as normalised training and test splits, all under one data root.

Every loader takes the same: `root`, the data root, which sets that need no files ignore; `num_train`, `num_test`
and, of sets that have one, `num_validation`, how many of the leading examples of each part to keep, None for all;
and sets of images `mean` and `std` by channel, of values in [0, 1]: subtracted, then divided by.
"""

# ruff: noqa: F401  (names that others import from here)
from curvlab.lab.data.download import DamagedDataError, DataNotFoundError
from curvlab.lab.data.image_folder import load_image_folder
from curvlab.lab.data.images import (
    cropped_and_flipped,
    load_cifar10,
    load_cifar100,
    load_fashion_mnist,
    load_mnist,
    load_reconstruction,
)
from curvlab.lab.data.splits import DataSplits
from curvlab.lab.data.summaries import (
    DocumentSummary,
    SummaryCorpus,
    copying_pairs,
    load_hub_summaries,
    load_shortened_documentation,
    load_xsum,
)
from curvlab.lab.data.tables import (
    load_breast_cancer,
    load_breast_cancer_one_hot,
    load_concrete,
    load_diabetes,
    load_diabetes_progression,
    load_digits,
    load_energy,
    load_libsvm,
    load_pima_diabetes,
)
from curvlab.lab.data.text import TextCorpus, load_documentation, load_hub_text, load_penn_treebank
from curvlab.lab.data.tokens import (
    SummarySplits,
    TokenSplits,
    pretrained_tokenizer,
    summary_splits,
    token_splits,
    train_tokenizer,
)

"""Real data sets as normalised training and test splits, all under one data root."""

from curvlab.lab.data.augmentation import cropped_and_flipped
from curvlab.lab.data.cifar import load_cifar10, load_cifar100
from curvlab.lab.data.documentation import load_documentation
from curvlab.lab.data.errors import DamagedDataError, DataNotFoundError
from curvlab.lab.data.hub_text import load_hub_text
from curvlab.lab.data.image_folder import load_image_folder
from curvlab.lab.data.libsvm import load_breast_cancer_one_hot, load_libsvm
from curvlab.lab.data.mnist import load_fashion_mnist, load_mnist
from curvlab.lab.data.penn_treebank import load_penn_treebank
from curvlab.lab.data.reconstruction import load_reconstruction
from curvlab.lab.data.scikit_learn import (
    load_breast_cancer,
    load_diabetes,
    load_diabetes_progression,
    load_digits,
)
from curvlab.lab.data.shortened_documentation import load_shortened_documentation
from curvlab.lab.data.splits import DataSplits
from curvlab.lab.data.summary_corpus import DocumentSummary, SummaryCorpus, copying_pairs
from curvlab.lab.data.summary_splits import SummarySplits, summary_splits
from curvlab.lab.data.text_corpus import TextCorpus
from curvlab.lab.data.token_splits import TokenSplits, pretrained_tokenizer, token_splits, train_tokenizer
from curvlab.lab.data.uci import load_concrete, load_energy, load_pima_diabetes
from curvlab.lab.data.xsum import load_hub_summaries, load_xsum

__all__ = [
    "DamagedDataError",
    "DataNotFoundError",
    "DataSplits",
    "DocumentSummary",
    "SummaryCorpus",
    "SummarySplits",
    "TextCorpus",
    "TokenSplits",
    "copying_pairs",
    "cropped_and_flipped",
    "load_breast_cancer",
    "load_breast_cancer_one_hot",
    "load_cifar10",
    "load_cifar100",
    "load_concrete",
    "load_diabetes",
    "load_diabetes_progression",
    "load_digits",
    "load_documentation",
    "load_energy",
    "load_fashion_mnist",
    "load_hub_summaries",
    "load_hub_text",
    "load_image_folder",
    "load_libsvm",
    "load_mnist",
    "load_penn_treebank",
    "load_pima_diabetes",
    "load_reconstruction",
    "load_shortened_documentation",
    "load_xsum",
    "pretrained_tokenizer",
    "summary_splits",
    "token_splits",
    "train_tokenizer",
]

"""Real data sets as normalised training and test splits, all under one data root."""

from curvlab.data.augmentation import cropped_and_flipped
from curvlab.data.cifar import load_cifar10, load_cifar100
from curvlab.data.documentation import load_documentation
from curvlab.data.errors import DamagedDataError, DataNotFoundError
from curvlab.data.hub_text import load_hub_text
from curvlab.data.image_folder import load_image_folder
from curvlab.data.libsvm import load_breast_cancer_one_hot, load_libsvm
from curvlab.data.mnist import load_fashion_mnist, load_mnist
from curvlab.data.penn_treebank import load_penn_treebank
from curvlab.data.reconstruction import load_reconstruction
from curvlab.data.scikit_learn import (
    load_breast_cancer,
    load_diabetes,
    load_diabetes_progression,
    load_digits,
)
from curvlab.data.shortened_documentation import load_shortened_documentation
from curvlab.data.splits import DataSplits, stack
from curvlab.data.summary_corpus import DocumentSummary, SummaryCorpus, copying_pairs
from curvlab.data.summary_splits import SummarySplits, summary_splits
from curvlab.data.text_corpus import TextCorpus
from curvlab.data.token_splits import TokenSplits, pretrained_tokenizer, token_splits, train_tokenizer
from curvlab.data.uci import load_concrete, load_energy, load_pima_diabetes
from curvlab.data.xsum import load_hub_summaries, load_xsum

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
    "stack",
    "summary_splits",
    "token_splits",
    "train_tokenizer",
]

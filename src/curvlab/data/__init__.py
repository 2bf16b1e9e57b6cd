"""Real data sets as normalised training and test splits, all under one data root."""

from curvlab.data.cifar import load_cifar10, load_cifar100
from curvlab.data.documentation import load_documentation
from curvlab.data.errors import DamagedDataError, DataNotFoundError
from curvlab.data.hub_text import load_hub_text
from curvlab.data.image_folder import load_image_folder
from curvlab.data.libsvm import load_breast_cancer_one_hot, load_libsvm
from curvlab.data.mnist import load_fashion_mnist, load_mnist
from curvlab.data.penn_treebank import load_penn_treebank
from curvlab.data.scikit_learn import load_breast_cancer, load_diabetes, load_digits
from curvlab.data.splits import DataSplits, stack
from curvlab.data.text_corpus import TextCorpus
from curvlab.data.token_splits import TokenSplits, pretrained_tokenizer, token_splits, train_tokenizer

__all__ = [
    "DamagedDataError",
    "DataNotFoundError",
    "DataSplits",
    "TextCorpus",
    "TokenSplits",
    "load_breast_cancer",
    "load_breast_cancer_one_hot",
    "load_cifar10",
    "load_cifar100",
    "load_diabetes",
    "load_digits",
    "load_documentation",
    "load_fashion_mnist",
    "load_hub_text",
    "load_image_folder",
    "load_libsvm",
    "load_mnist",
    "load_penn_treebank",
    "pretrained_tokenizer",
    "stack",
    "token_splits",
    "train_tokenizer",
]

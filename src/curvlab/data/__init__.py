"""Real data sets as normalised training and test splits, all under one data root."""

from curvlab.data.cifar import load_cifar10, load_cifar100
from curvlab.data.errors import DamagedDataError, DataNotFoundError
from curvlab.data.image_folder import load_image_folder
from curvlab.data.libsvm import load_breast_cancer_one_hot, load_libsvm
from curvlab.data.mnist import load_fashion_mnist, load_mnist
from curvlab.data.scikit_learn import load_breast_cancer, load_diabetes, load_digits
from curvlab.data.splits import DataSplits, stack

__all__ = [
    "DamagedDataError",
    "DataNotFoundError",
    "DataSplits",
    "load_breast_cancer",
    "load_breast_cancer_one_hot",
    "load_cifar10",
    "load_cifar100",
    "load_diabetes",
    "load_digits",
    "load_fashion_mnist",
    "load_image_folder",
    "load_libsvm",
    "load_mnist",
    "stack",
]

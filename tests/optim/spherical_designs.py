"""Exact averages over the unit sphere, for polynomials of degree 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def spherical_design(size: int) -> Tensor:
    """Unit vectors, (n, count), whose averages equal those over the sphere for polynomials of degree 4.

    Pair, hexagon, icosahedron, 24-cell (Delsarte, Goethals & Seidel 1977).
    """
    if size == 1:
        points = [[1.0], [-1.0]]
    elif size == 2:
        points = [[math.cos(k * math.pi / 3), math.sin(k * math.pi / 3)] for k in range(6)]
    elif size == 3:
        golden = (1 + math.sqrt(5)) / 2
        signs = [(s, t * golden) for s in (1, -1) for t in (1, -1)]
        points = [p for a, b in signs for p in ([0, a, b], [a, b, 0], [b, 0, a])]
    elif size == 4:
        points = []
        for i in range(4):
            for j in range(i):
                for s in (1, -1):
                    for t in (1, -1):
                        point = [0.0] * 4
                        point[i], point[j] = s, t
                        points.append(point)
    else:
        raise ValueError(size)
    directions = torch.tensor(points, dtype=torch.float64).T
    return directions / directions.norm(dim=0)

"""Tables of ranks, packed: each column is told by how it differs from the column that is most like it.

A table has a row for each half (of the training set) and query, block after block of them; its columns say which
place each method gives a half among all. A permutation of S halves takes log2 S! bits, in a compressed CSV one and
a half times that. Of a method that is nearly another little is new: in the order of the other, how many of the
halves that are still to come stand lower (Lehmer's code of a permutation) is nearly always 0 or little.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype
from scipy.stats import rankdata

HALF, QUERY = "half", "query"
BLOCKS = ("task", "network", "fraction")  # columns that are the same in a whole block
_MOST_HALVES = 128  # 2 (S - 1) + 1 is a byte

Numbers = NDArray[Any]


def pack_csv(text: str) -> bytes | None:
    """Return the packed table of a CSV's text; None where it is none of ranks."""
    if not {HALF, QUERY} <= set(text.partition("\n")[0].split(",")):
        return None
    return pack(pd.read_csv(io.StringIO(text)))


def pack(table: pd.DataFrame) -> bytes | None:
    """Return the bytes of a table with halves and queries, a line of JSON and codes; None where it has no ranks.

    Columns that a block has no ranks in are NaN there. What is packed is always the same table again.
    """
    names = [name for name in table.columns if name not in (*BLOCKS, HALF, QUERY)]
    if not all(map(is_numeric_dtype, table[[HALF, QUERY, *names]].dtypes)):
        return None
    blocks, codes = [], []
    for keys, own in _blocks(table):
        halves, queries = int(own[HALF].max()) + 1, int(own[QUERY].max()) + 1
        if halves * queries != len(own) or halves > _MOST_HALVES:
            return None
        have = [place for place, name in enumerate(names) if own[name].notna().all()]
        ranks = own[[names[place] for place in have]].to_numpy(dtype=float).T.reshape(-1, halves, queries)
        chain = _chain(ranks)
        codes.append(_coded(ranks, chain).tobytes())
        likes = [[have[place], like] for place, like in chain]
        blocks.append(keys | {"halves": halves, "queries": queries, "columns, like": likes})
    told = json.dumps({"columns": list(table.columns), "blocks": blocks})
    packed = lzma.compress(told.encode() + b"\n" + b"".join(codes), preset=9 | lzma.PRESET_EXTREME)
    return packed if unpack(packed).equals(table) else None


def unpack(packed: bytes) -> pd.DataFrame:
    """Return the table that `pack` was given."""
    told, _, codes = lzma.decompress(packed).partition(b"\n")
    about = json.loads(told)
    names = [name for name in about["columns"] if name not in (*BLOCKS, HALF, QUERY)]
    parts, used = [], 0
    for block in about["blocks"]:
        shape = (len(chain := block["columns, like"]), block["halves"], block["queries"])
        code = np.frombuffer(codes, np.uint8, int(np.prod(shape)), used).reshape(shape)
        used += code.size
        half, query = np.indices(shape[1:]).reshape(2, -1)
        values = np.full((len(half), len(names)), np.nan)
        for (place, _), ranks in zip(chain, _ranks(code, [like for _, like in chain]), strict=True):
            values[:, place] = ranks.ravel()
        keys = {name: block[name] for name in BLOCKS if name in block}
        parts.append(pd.DataFrame({**keys, HALF: half, QUERY: query}).join(pd.DataFrame(values, columns=names)))
    table = pd.concat(parts, ignore_index=True)[about["columns"]]
    whole = [name for name in names if (table[name] % 1 == 0).all()]
    return table.astype(dict.fromkeys(whole, "int64"))


def _blocks(table: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield runs of rows that have the same keys, with the keys."""
    keys = [name for name in BLOCKS if name in table]
    starts = (table[keys] != table[keys].shift()).any(axis=1) | (table.index == 0)
    for _, own in table.groupby(starts.cumsum(), sort=False):
        yield {name: own[name].tolist()[0] for name in keys}, own


def _chain(ranks: Numbers) -> list[tuple[int, int | None]]:
    """Return the columns, each with the place in the chain of the earlier one that it correlates with most."""
    centred = (ranks - ranks.mean(1, keepdims=True)).reshape(len(ranks), -1)
    alike = np.corrcoef(centred + 1e-9 * np.arange(centred.shape[1]))  # constant columns, too
    chain: list[tuple[int, int | None]] = [(0, None)] if len(ranks) else []
    while len(chain) < len(ranks):
        known = [place for place, _ in chain]
        rest = [place for place in range(len(ranks)) if place not in known]
        like, new = np.unravel_index(alike[np.ix_(known, rest)].argmax(), (len(known), len(rest)))
        chain.append((rest[int(new)], int(like)))
    return chain


def _order(like: Numbers | None, shape: tuple[int, ...]) -> Numbers:
    return np.argsort(np.zeros(shape) if like is None else like, axis=0, kind="stable")


def _coded(ranks: Numbers, chain: list[tuple[int, int | None]]) -> Numbers:
    """Return twice how many later halves rank lower, one more where a later one ranks alike, (C, S, M)."""
    orders = [_order(None if like is None else ranks[chain[like][0]], ranks.shape[1:]) for _, like in chain]
    pairs = zip(chain, orders, strict=True)
    own = np.stack([np.take_along_axis(ranks[place], order, axis=0) for (place, _), order in pairs])
    code = np.zeros(own.shape, dtype=np.uint8)
    for i in range(own.shape[1]):
        later, here = own[:, i + 1 :], own[:, i : i + 1]
        code[:, i] = 2 * (later < here).sum(1) + (later == here).any(1)
    return code


def _ranks(code: Numbers, likes: list[int | None]) -> Numbers:
    """Return the ranks from 1 on, ties averaged, of the columns in the chain's order, (C, S, M)."""
    lower = np.zeros(code.shape, dtype=np.int16)  # how many of the halves so far rank lower
    for i in reversed(range(code.shape[1])):
        fewer, alike = code[:, i] >> 1, code[:, i] & 1
        later = lower[:, i + 1 :]
        later += later >= (fewer + alike)[:, None]
        lower[:, i] = fewer
    ranks: list[Numbers] = []
    for own, like in zip(lower, likes, strict=True):
        order, found = _order(None if like is None else ranks[like], own.shape), np.zeros(own.shape)
        np.put_along_axis(found, order, own.astype(float), axis=0)
        ranks.append(rankdata(found, axis=0))
    return np.stack(ranks) if ranks else np.zeros(code.shape)

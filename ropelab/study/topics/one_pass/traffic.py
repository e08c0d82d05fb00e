"""Count the bytes between the projections and attention: in one pass, and in separate launches."""

import pandas as pd

LAUNCHES = {
    "norm; rotation; cache": lambda q, k, e, c: 4 * e * (q + k) + 2 * e * k + 2 * c * k,
    "norm and rotation; cache": lambda q, k, e, c: 2 * e * (q + k) + 2 * e * k + 2 * c * k,
    "norm, rotation and cache": lambda q, k, e, c: e * (q + 2 * k) + e * q + 2 * c * k,
}
"""The launches, separated by semicolons -> the bytes that they read and write, a function of four numbers.

The numbers are the elements of q, the elements of k (v has as many), the bytes e of an activation, and the bytes c of
an element of the cache. Tables, weights and slots are left out, because all heads share them.
"""


def bytes_moved(q_heads: int, k_heads: int, head_dim: int, activation: int = 2) -> pd.DataFrame:
    """The kilobytes that launches move for a token, and these bytes over the bytes of one pass.

    The second number is the most that one pass can be faster.

    Args:
        q_heads, k_heads, head_dim: the heads of q, of k and of v, and their features.
        activation: the bytes of an element of q, k and v.

    Returns:
        A row for each of `LAUNCHES`; for caches of 16 and of 8 bits the columns ``"<bits>-bit cache, kB"`` and
        ``"<bits>-bit cache, passes"``.
    """
    columns = {}
    for cache in (2, 1):
        moved = {
            name: count(q_heads * head_dim, k_heads * head_dim, activation, cache) for name, count in LAUNCHES.items()
        }
        kilobytes = pd.Series(moved) / 1000
        columns[f"{8 * cache}-bit cache, kB"] = kilobytes
        columns[f"{8 * cache}-bit cache, passes"] = kilobytes / kilobytes.iloc[-1]
    return pd.DataFrame(columns)

"""Which bucket a call goes to: the smallest one that holds its tensors.

Standard library only; the runtime asks at every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from compilekit.errors import NoBucketError
from compilekit.plan import Bucket, Shaped, elements

# A server sees few distinct shapes; this bounds what a hostile caller can make it keep.
_MEMO_SIZE = 4096


class Rule(Shaped, Protocol):
    """An input's shape and pad value, of a configuration or of an artifact."""

    @property
    def pad(self) -> bool | int | float | None: ...


class BucketTable:
    """The buckets of one entry, ready for fast choice; made by `bucket_table`.

    Attributes:
        axes: Axis names; the order of values given to `choose`.
        buckets: From the fewest elements to the most. How many elements of a call are
            real doesn't depend on the bucket, so the first that holds it pads least.
        sizes: Sizes of each bucket, in the order of `axes`.
        exact: Axis → the input that can't be padded along it.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        buckets: tuple[Bucket, ...],
        sizes: tuple[tuple[int, ...], ...],
        exact: Mapping[str, str],
    ) -> None:
        self.axes = axes
        self.buckets = buckets
        self.sizes = sizes
        self.exact = exact
        self._memo: dict[tuple[int, ...], Bucket | None] = {}

    def choose(self, values: tuple[int, ...]) -> Bucket | None:
        """The bucket with the least padding that holds `values`, or None.

        Safe from several threads: both would compute and store the same answer.

        Args:
            values: The call's real size along each of `axes`.
        """
        try:
            return self._memo[values]
        except KeyError:
            pass
        chosen = next(
            (
                bucket
                for bucket, sizes in zip(self.buckets, self.sizes, strict=True)
                if self._holds(sizes, values)
            ),
            None,
        )
        if len(self._memo) >= _MEMO_SIZE:
            self._memo.clear()
        self._memo[values] = chosen
        return chosen

    def _holds(self, sizes: tuple[int, ...], values: tuple[int, ...]) -> bool:
        return all(
            size == value if axis in self.exact else size >= value
            for axis, size, value in zip(self.axes, sizes, values, strict=True)
        )


def bucket_table(buckets: Iterable[Bucket], rules: Mapping[str, Rule]) -> BucketTable:
    """Prepare the choice among an entry's buckets.

    Equal padding is decided by the smaller first axis (the batch), then by the next.

    Args:
        buckets: At least one; all with the same axes.
        rules: Input path → rule. An axis of an input without a pad value accepts only
            the exact sizes of buckets.
    """
    inputs = tuple(rules.values())
    ordered = sorted(
        buckets,
        key=lambda bucket: (elements(inputs, bucket.axes), *bucket.axes.values()),
    )
    axes = tuple(ordered[0].axes)
    exact: dict[str, str] = {}
    for path, rule in rules.items():
        if rule.pad is None:
            for size in rule.shape:
                if isinstance(size, str):
                    exact.setdefault(size, path)
    return BucketTable(
        axes=axes,
        buckets=tuple(ordered),
        sizes=tuple(tuple(bucket.axes[a] for a in axes) for bucket in ordered),
        exact=exact,
    )


def choose(
    buckets: Iterable[Bucket], wanted: Mapping[str, int], rules: Mapping[str, Rule]
) -> Bucket | None:
    """The bucket with the least padding that holds `wanted`, or None.

    For a single question; `bucket_table` answers many faster.

    Args:
        buckets: See `bucket_table`.
        wanted: Axis → the call's real size.
        rules: See `bucket_table`.
    """
    table = bucket_table(buckets, rules)
    return table.choose(tuple(wanted[axis] for axis in table.axes))


def no_bucket_error(
    table: BucketTable, values: tuple[int, ...], entry: str
) -> NoBucketError:
    """Say why no bucket of an entry holds a call, and what can be done.

    Args:
        table: The entry's buckets.
        values: What `BucketTable.choose` refused.
        entry: The entry's name.
    """
    wanted = dict(zip(table.axes, values, strict=True))
    largest = table.buckets[-1]
    reasons = []
    too_long = False
    for axis, value in wanted.items():
        sizes = sorted({bucket.axes[axis] for bucket in table.buckets})
        listing = ", ".join(map(str, sizes))
        if axis in table.exact:
            if value not in sizes:
                reasons.append(
                    f"{axis} must be one of {listing}, because input"
                    f" {table.exact[axis]} has no pad value"
                )
        elif value > sizes[-1]:
            reasons.append(f"{axis} goes up to {sizes[-1]}")
            too_long = True
    if not reasons:
        reasons.append("each size has a bucket, but no bucket has all of them")
    asked = ", ".join(f"{axis} = {value}" for axis, value in wanted.items())
    return NoBucketError(
        f"{entry}: no bucket holds {asked}: {'; '.join(reasons)}. The largest bucket"
        f" is {largest.name}.",
        hint="Give a smaller input, add the size to [axes] and build again, or set"
        ' on_uncovered = "eager" or "jit" to run such calls without a program.',
        entry=entry,
        wanted=wanted,
        largest=largest.name,
        too_long=too_long,
        buckets=[bucket.name for bucket in table.buckets],
    )

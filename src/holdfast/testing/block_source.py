"""A source of blocks in chosen pieces, that may fail or act before any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from holdfast.format.digests import Buffer


class SourceFailedError(Exception):
    """The error of a source that fails on purpose."""


def fail(offset_bytes: int) -> None:
    """Fail the request of a block."""
    raise SourceFailedError


class BlockSource:
    """A source of the concatenation of `pieces`.

    Args:
        pieces: the bytes; a block ends where a piece ends.
        size_bytes: the size that the source states; None: that of all pieces.
        is_lasting: if False, the memory of a block is overwritten once the next one is requested.
        on_block: called with the offset of each block before it is yielded.
        on_end: called after the last byte was consumed.
    """

    def __init__(
        self,
        pieces: Sequence[Buffer],
        *,
        size_bytes: int | None = None,
        is_lasting: bool = True,
        on_block: Callable[[int], object] = lambda offset_bytes: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        total_bytes = sum(map(len, self._pieces))
        self.size_bytes = total_bytes if size_bytes is None else size_bytes
        self.is_lasting = is_lasting
        self._total_bytes = total_bytes
        self._on_block = on_block
        self._on_end = on_end

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        # A source of another size than it states yields what it has, or too much.
        stop_bytes = self._total_bytes if stop_bytes == self.size_bytes else stop_bytes
        offset_bytes = 0
        for piece in self._pieces:
            start, stop = max(0, start_bytes - offset_bytes), stop_bytes - offset_bytes
            if (start < len(piece) and stop > 0) or not piece:
                self._on_block(offset_bytes + start)
                yield from self._lent(piece[start : max(0, stop)])
            offset_bytes += len(piece)
        if stop_bytes == self._total_bytes:
            self._on_end()

    def _lent(self, block: memoryview) -> Iterator[Buffer]:
        if self.is_lasting:
            yield block
            return
        scratch = bytearray(block)
        yield scratch
        scratch[:] = b"\xff" * len(scratch)

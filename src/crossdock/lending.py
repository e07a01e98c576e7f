"""What a dispatcher knows of the input buffer that it lends: which view is good for a dispatch, and which is not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .errors import InvalidInput


@dataclass
class Lending:
    """The input buffer that was lent last, and whether it still holds what its producer has written.

    Attributes:
        addresses: of the whole buffer; none before it is lent for the first time.
        num_tokens: that were lent and are not dispatched yet; 0 once they have been, or were overwritten.
    """

    addresses: range = range(0)
    num_tokens: int = 0

    def begin(self, view: Tensor, max_tokens: int) -> None:
        """Lend `view [T, hidden_dim]` of a buffer with `max_tokens` rows, and take back what was lent before."""
        self.num_tokens = view.shape[0]
        if self.num_tokens:  # else it has no address
            row_bytes = view.nbytes // self.num_tokens
            self.addresses = range(view.data_ptr(), view.data_ptr() + max_tokens * row_bytes)

    def end(self) -> None:
        """Rows are moved out: the buffer's own, or others over them."""
        self.num_tokens = 0

    def check_combined(self, rows: Tensor) -> None:
        """Refuse `rows [R, hidden_dim]` of a combine that lie in the buffer: its backward writes there first.

        Raises:
            InvalidInput: they do.
        """
        if self.addresses and rows.data_ptr() in self.addresses:
            raise InvalidInput(
                "rows lie in an input buffer, which the backward of a combine overwrites before it reads them: combine"
                " a tensor of your own"
            )

    def check(self, x: Tensor, compiled: bool) -> None:
        """Refuse `x [T, hidden_dim]` if it lies in the buffer and is not what was lent.

        Raises:
            InvalidInput: also where a compiled call brings anything else while the buffer is lent: compilers write
                into tensors that a region is given when it ends, so behind the call.
        """
        if not self.addresses:
            return
        if x.data_ptr() in self.addresses:
            if not self.num_tokens:
                raise InvalidInput(
                    "x lies in an input buffer that has been dispatched or overwritten since it was lent: call"
                    " input_buffer again, fill what it returns, and dispatch that"
                )
            if x.data_ptr() != self.addresses.start or x.shape[0] != self.num_tokens or not x.is_contiguous():
                raise InvalidInput(
                    f"x lies in the input buffer and is not the view of {self.num_tokens} tokens that was lent last:"
                    " dispatch that view, or a copy"
                )
        elif compiled and self.num_tokens:
            raise InvalidInput(
                f"an input buffer of {self.num_tokens} tokens is lent, and a compiled dispatch brings other rows: fill"
                " the buffer outside of compiled regions, and dispatch it first"
            )

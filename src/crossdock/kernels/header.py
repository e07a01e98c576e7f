"""The header that opens a call: what a rank understands it to be, laid out beside its data.

Headers are kept twice, by the parity of the round that carries them, `headers [2, W]` int64. That is enough: whoever
lays out the header of round n + 1 has seen every rank publish round n, and each of them had read round n - 1 by then
(see `signal.py` for the patterns). Round 5 goes to place 1 and round 6 to place 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch


def write_header(words_ptr, headers_ptr, state_ptr, NUM_WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr):
    """Lay out the header of the round that is about to be published; called by one program (pattern publish)."""
    word = tl.arange(0, WORDS_BLOCK)
    place = (tl.load(state_ptr) + 1) % 2
    value = tl.load(words_ptr + word, mask=word < NUM_WORDS, other=0)
    tl.store(headers_ptr + place * NUM_WORDS + word, value, mask=word < NUM_WORDS)


def read_headers_kernel(
    table_ptr,  # [EP] int64: addresses of int64 [2, W]
    state_ptr,  # [1 + num_buffers] int64
    heard_ptr,  # [EP, W] int64
    NUM_WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
):
    """Bring one rank's header here; launched behind a wait (pattern acquire)."""
    from_rank = tl.program_id(0)
    word = tl.arange(0, WORDS_BLOCK)
    place = tl.load(state_ptr) % 2
    headers = tl.load(table_ptr + from_rank).to(tl.pointer_type(tl.int64))
    value = tl.load(headers + place * NUM_WORDS + word, mask=word < NUM_WORDS, other=0)
    tl.store(heard_ptr + from_rank * NUM_WORDS + word, value, mask=word < NUM_WORDS)


def launch_read_headers(table: torch.Tensor, state: torch.Tensor, heard: torch.Tensor) -> None:
    """Fill `heard [ep_size, W]` int64 (contiguous) with the headers of the last round, by rank."""
    ep_size, num_words = heard.shape
    launch(
        read_headers_kernel,
        (ep_size,),
        heard.device,
        table,
        state,
        heard,
        NUM_WORDS=num_words,
        WORDS_BLOCK=triton.next_power_of_2(num_words),
        num_warps=1,
    )

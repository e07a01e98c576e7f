"""The bulk-copy kernels' own text, run on a CPU: every lane is a fiber, and copies happen some time after their issue.

Which lane goes on, and which copy is done next, is drawn. A stage that is to be filled is spoiled at once, so that one
filled too early is seen; when nobody can go on any more, the block is stuck.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux only")

from crossdock.kernels import bulk_rows
from crossdock.kernels.bulk_rows import PullArguments, Ring, Tuning
from crossdock.kernels.bulk_source import PULL_ROWS

_COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(_COMPILER is None, reason="needs g++, which turns the kernels into programs for a CPU")

_EMULATION = r"""
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

#define INLINE inline
#define SHARED_MEMORY(name) char* name = block->shared.get()
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  u32 x;
};
static Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Barrier {
  u32 arrivals, missing, phase;
  long long bytes;
  void look() {
    if (missing == 0 && bytes == 0) {
      phase ^= 1;
      missing = arrivals;
    }
  }
};
struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* barrier;             // of a load
  std::shared_ptr<int> group;  // of a store: how many are not done
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended = false;
  std::function<bool()> may_go_on;
  std::shared_ptr<int> open = std::make_shared<int>(0);
  std::vector<std::shared_ptr<int>> groups;
};
struct Meeting {  // of a warp or a block
  u32 come = 0, number = 0, votes = 0, result = 0;
};
struct Block {
  std::unique_ptr<char[]> shared;
  std::map<u64*, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  std::vector<int> values;
  Meeting all;
  ucontext_t scheduler;
  std::mt19937 random;
  bool wrong = false;
};
static std::unique_ptr<Block> block;

static void wait_for(std::function<bool()> may_go_on) {
  Fiber& fiber = block->fibers[threadIdx.x];
  fiber.may_go_on = may_go_on;
  swapcontext(&fiber.context, &block->scheduler);
}
static void pause() {
  if (block->random() % 4 == 0) wait_for([] { return true; });
}
static u32 meet(Meeting& meeting, u32 members, u32 vote) {
  meeting.votes |= vote;
  if (++meeting.come == members) {
    meeting.result = meeting.votes;
    meeting.votes = meeting.come = 0;
    ++meeting.number;
    return meeting.result;
  }
  const u32 number = meeting.number;
  wait_for([&meeting, number] { return meeting.number != number; });
  return meeting.result;
}
inline Meeting& warp() { return block->warps[threadIdx.x / 32]; }
inline u32 __ballot_sync(u32, bool vote) { return meet(warp(), 32, (u32)vote << threadIdx.x % 32); }
inline void __syncwarp() { meet(warp(), 32, 0); }
inline int __syncthreads_or(int vote) { return meet(block->all, block->fibers.size(), vote != 0); }
inline void __syncthreads() { meet(block->all, block->fibers.size(), 0); }
inline u32 __shfl_sync(u32, u32 value, int from) {
  block->values[threadIdx.x] = value;
  __syncwarp();
  const u32 result = block->values[threadIdx.x / 32 * 32 + from];
  __syncwarp();
  return result;
}
template <class T>
inline T __ldg(const T* pointer) { return *pointer; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __ffs(u32 bits) { return __builtin_ffs(bits); }

inline void init_barrier(u64* barrier, u32 arrivals) { block->barriers[barrier] = {arrivals, arrivals, 0, 0}; }
inline void fence_for_copies() {}
inline void arrive_expecting(u64* barrier, u32 bytes) {
  pause();
  Barrier& at = block->barriers.at(barrier);
  if (at.missing == 0) block->wrong = true;
  at.bytes += bytes;
  --at.missing;
  at.look();
}
inline void arrive(u64* barrier) { arrive_expecting(barrier, 0); }
inline void wait(u64* barrier, u32 parity) {
  Barrier& at = block->barriers.at(barrier);
  pause();
  wait_for([&at, parity] { return at.phase != parity; });
}
inline void load_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  pause();
  if ((u64)shared % 16 || (u64)global % 16 || bytes % 16 || bytes == 0) block->wrong = true;
  memset(shared, 0xEE, bytes);
  block->copies.push_back({shared, global, bytes, barrier, nullptr});
}
inline void store_bulk(void* global, const void* shared, u32 bytes) {
  Fiber& fiber = block->fibers[threadIdx.x];
  if ((u64)shared % 16 || (u64)global % 16 || bytes % 16 || bytes == 0) block->wrong = true;
  ++*fiber.open;
  block->copies.push_back({global, shared, bytes, nullptr, fiber.open});
}
inline void close_group() {
  Fiber& fiber = block->fibers[threadIdx.x];
  fiber.groups.push_back(fiber.open);
  fiber.open = std::make_shared<int>(0);
}
template <int PENDING_GROUPS>
inline void wait_until_read() {
  Fiber& fiber = block->fibers[threadIdx.x];
  const int last = (int)fiber.groups.size() - PENDING_GROUPS;
  wait_for([&fiber, last] {
    for (int i = 0; i < last; ++i)
      if (*fiber.groups[i]) return false;
    return true;
  });
}
inline void wait_until_stored() { wait_until_read<0>(); }
"""

_RUN = r"""
static const void* given;
static void run_lane() {
  KERNEL(*(const ARGUMENTS*)given);
  block->fibers[threadIdx.x].ended = true;
  swapcontext(&block->fibers[threadIdx.x].context, &block->scheduler);
}
static void do_copy() {
  const size_t at = block->random() % block->copies.size();
  const Copy copy = block->copies[at];
  block->copies.erase(block->copies.begin() + at);
  memcpy(copy.to, copy.from, copy.bytes);
  if (copy.barrier) {
    Barrier& barrier = block->barriers.at(copy.barrier);
    barrier.bytes -= copy.bytes;
    barrier.look();
  } else {
    --*copy.group;
  }
}
// 0: done; 1: stuck; 2: used in a wrong way; 3: copies left behind
static int run_block(int threads, int shared_bytes, u32 seed) {
  block = std::make_unique<Block>();
  block->random.seed(seed);
  block->shared.reset((char*)::operator new[](shared_bytes, std::align_val_t(128)));
  block->fibers.resize(threads);
  block->warps.resize(threads / 32);
  block->values.resize(threads);
  for (Fiber& fiber : block->fibers) {
    fiber.stack.resize(1 << 16);
    fiber.may_go_on = [] { return true; };
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, run_lane, 0);
  }
  while (true) {
    if (!block->copies.empty() && block->random() % 64 == 0) do_copy();
    bool went_on = false, alive = false;
    const int first = block->random() % threads;
    for (int i = 0; i < threads && !went_on; ++i) {
      Fiber& fiber = block->fibers[(first + i) % threads];
      alive |= !fiber.ended;
      if (fiber.ended || !fiber.may_go_on()) continue;
      threadIdx.x = (first + i) % threads;
      swapcontext(&block->scheduler, &fiber.context);
      went_on = true;
    }
    if (block->wrong) return 2;
    if (went_on) continue;
    if (!alive) return block->copies.empty() ? 0 : 3;
    if (block->copies.empty()) return 1;
    do_copy();
  }
}
extern "C" int run(const void* arguments, int blocks, int threads, int shared_bytes, u32 seed) {
  given = arguments;
  gridDim.x = blocks;
  for (blockIdx.x = 0; (int)blockIdx.x < blocks; ++blockIdx.x)
    if (const int code = run_block(threads, shared_bytes, seed + blockIdx.x)) return code;
  return 0;
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a kernel of certain macros as a function for a CPU; kept."""
    folder = tmp_path_factory.mktemp("bulk")
    kept: dict[Any, Any] = {}

    def build(text: str, kernel: str, arguments: str, **defines: int) -> Any:
        key = (kernel, *defines.items())
        if key not in kept:
            kept[key] = _build(folder, f"k{len(kept)}", text, {"KERNEL": kernel, "ARGUMENTS": arguments, **defines})
        return kept[key]

    return build


def _build(folder: Path, name: str, text: str, defines: dict[str, Any]) -> Any:
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_EMULATION + text.replace("__restrict__", "") + _RUN)
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    macros = [f"-D{macro}={value}" for macro, value in defines.items()]
    subprocess.run([str(_COMPILER), *options, *macros, str(source), "-o", str(library)], check=True, timeout=110)
    return ctypes.CDLL(str(library)).run


def _addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def _small_ring(row_bytes: int, chunk_bytes: int, num_stages: int) -> Ring:
    return Ring(num_stages, -(-chunk_bytes // 128) * 128, row_bytes, chunk_bytes, -(-row_bytes // chunk_bytes))


_GIVEN_UP = torch.zeros(1, dtype=torch.int64)
_STATES = {0: "done", 1: "stuck", 2: "used in a wrong way", 3: "copies left behind"}

# ranks, this one, tokens, slots, elements, share of slots without a row, blocks, warps that store, pending
_PULLS = [
    (1, 0, 1, 1, 4, 0.0, 1, 1, 1),
    (2, 0, 37, 3, 28, 0.5, 3, 1, 1),
    (2, 1, 70, 8, 28, 0.9, 1, 2, 1),
    (4, 2, 45, 8, 12, 0.7, 8, 1, 2),
    (4, 3, 3, 2, 28, 0.0, 13, 1, 0),
    (3, 1, 66, 3, 28, 1.0, 2, 2, 2),
]


@pytest.mark.full
@pytest.mark.parametrize("case", _PULLS, ids=str)
def test_pull_rows(built: Any, case: tuple[Any, ...]):
    ep_size, rank, num_places, top_k, hidden_dim, missing, blocks, store_warps, pending = case
    generator = torch.Generator().manual_seed(sum(case[:5]))
    rows = [torch.randn(num_places, hidden_dim, generator=generator) for _ in range(ep_size)]
    wanted = torch.rand(ep_size, num_places, top_k, generator=generator) >= missing
    num_rows = int(wanted.sum())
    row_of_slot = torch.full((ep_size, num_places, top_k), -1, dtype=torch.int32)
    row_of_slot[~wanted & (torch.rand(wanted.shape, generator=generator) < 0.5)] = -2
    row_of_slot[wanted] = torch.randperm(num_rows, generator=generator).to(torch.int32)
    expected = torch.empty(num_rows, hidden_dim)
    for from_rank, token, slot in wanted.nonzero().tolist():
        expected[row_of_slot[from_rank, token, slot]] = rows[from_rank][token]

    run = built(PULL_ROWS, "pull_rows", "PullArguments", TOP_K=top_k, STORE_WARPS=store_warps, PENDING=pending)
    table = _addresses(rows)
    for num_stages in (store_warps * (pending + 2), 11):
        for seed in range(2):
            out = torch.full((num_rows + 1, hidden_dim), 7.0)
            ring = _small_ring(4 * hidden_dim, 48, num_stages)
            argument = PullArguments(
                table.data_ptr(), row_of_slot.data_ptr(), out.data_ptr(), _GIVEN_UP.data_ptr(), num_places, ep_size,
                rank, ring,
            )  # fmt: skip
            code = run(ctypes.byref(argument), blocks, 32 + 32 * store_warps, 1 << 16, seed)
            assert _STATES[code] == "done"
            assert torch.equal(out[:-1], expected)
            assert bool((out[-1] == 7).all())


def test_pull_rows_writes_nothing_once_given_up(built: Any):
    rows, row_of_slot, out = torch.ones(2, 4), torch.zeros(1, 2, 1, dtype=torch.int32), torch.full((2, 4), 7.0)
    table, given_up = _addresses([rows]), torch.full((1,), 2)
    argument = PullArguments(
        table.data_ptr(), row_of_slot.data_ptr(), out.data_ptr(), given_up.data_ptr(), 2, 1, 0, _small_ring(16, 16, 4)
    )
    run = built(PULL_ROWS, "pull_rows", "PullArguments", TOP_K=1, STORE_WARPS=1, PENDING=1)
    assert _STATES[run(ctypes.byref(argument), 2, 64, 1 << 16, 0)] == "done"
    assert bool((out == 7).all())


def test_a_stage_more_than_the_smallest_ring_is_not_needed(built: Any):
    """The rings that are really taken are no smaller than those above."""
    for tuning in (Tuning(), Tuning(store_warps=2, pending=2)):
        for row_bytes in (16, 4096, 14336, 57344):
            assert bulk_rows.pull_ring(row_bytes, 8, tuning).num_stages >= tuning.store_warps * (tuning.pending + 2)

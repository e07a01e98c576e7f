"""CUDA C++ of the bulk-copy kernels for Hopper GPUs, which are compiled when they are first used.

A copy engine of the multiprocessor moves whole rows (`cp.async.bulk`), so that a few blocks keep the link full. Rows go
through a ring of stages in shared memory. Stage s has two barriers: `full[s]` completes when what was asked for has
arrived, `empty[s]` when the stage may be filled again. Beside them lies a message, written before `full[s]` is
armed: what the stage holds and where it goes.

One warp, the producer, looks 32 units of work ahead, one a lane, and fills stages in the order of units; the other
warps empty them in the same order. A last message without a unit ends the block. A unit's rows that are longer than a
stage are moved in chunks, each in a stage of its own.

Patterns (see `signal.py`): the kernels run behind a wait (pattern acquire) in the same stream, and their copies are
complete when they end (pattern free). Copies go through the asynchronous proxy; a proxy fence stands between what this
rank has acquired and the first of them.
"""

from __future__ import annotations

# Everything that a GPU must do; the rest is plain C++.
PRIMITIVES = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

INLINE void init_barrier(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers, and all that other ranks' data depends on, visible to the copy engine.
INLINE void fence_for_copies() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

INLINE void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

INLINE void arrive_expecting(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

INLINE void wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

INLINE void load_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

INLINE void store_bulk(void* global, const void* shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// The stores since the last call are one group, of this thread.
INLINE void close_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All groups but the last `PENDING_GROUPS` have been read out of shared memory.
template <int PENDING_GROUPS>
INLINE void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING_GROUPS) : "memory");
}

INLINE void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""

_RING = r"""
constexpr u32 EVERY_LANE = 0xffffffffu;

struct Ring {
  int num_stages;
  int stage_bytes;  // distance of stages
  int row_bytes;
  int chunk_bytes;  // of a row, all chunks but the last
  int num_chunks;
};

INLINE int bytes_of_chunk(const Ring& ring, int chunk) {
  return min(ring.chunk_bytes, ring.row_bytes - chunk * ring.chunk_bytes);
}

// A place on the way round the ring, and the parity of the barrier phase that is waited for there.
struct Place {
  int stage;
  u32 parity;
};

INLINE Place further(Place place, int stages, int num_stages) {
  place.stage += stages;
  if (place.stage >= num_stages) {
    place.stage -= num_stages;
    place.parity ^= 1;
  }
  return place;
}

// Gives the barriers behind the stages, and the messages behind the barriers.
INLINE u64* full_of(char* shared, const Ring& ring) { return (u64*)(shared + ring.num_stages * ring.stage_bytes); }
INLINE u64* empty_of(char* shared, const Ring& ring) { return full_of(shared, ring) + ring.num_stages; }
INLINE void* messages_of(char* shared, const Ring& ring) { return empty_of(shared, ring) + ring.num_stages; }

INLINE void start_ring(char* shared, const Ring& ring, u32 arrivals_to_empty) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < ring.num_stages; ++stage) {
      init_barrier(full_of(shared, ring) + stage, 1);
      init_barrier(empty_of(shared, ring) + stage, arrivals_to_empty);
    }
    fence_for_copies();
  }
  __syncthreads();
}

// Slots of one token, in registers.
INLINE void load_slots(const int* slots, int (&values)[TOP_K]) {
#pragma unroll
  for (int slot = 0; slot < TOP_K; ++slot) values[slot] = __ldg(slots + slot);
}

INLINE void no_slots(int (&values)[TOP_K]) {
#pragma unroll
  for (int slot = 0; slot < TOP_K; ++slot) values[slot] = -1;
}
"""

# Two ranks, this is rank 0, one block: the units are (token 0, rank 1), (token 0, rank 0), (token 1, rank 0)
# and (token 1, rank 1): a block goes round the ranks.
PULL_ROWS = (
    _RING
    + r"""
struct PullArguments {
  const u64* rows_table;     // [ep_size]: addresses of [max_tokens, D]
  const int* row_of_slot;    // [ep_size, num_places, TOP_K]; below 0 is no row
  char* out;                 // [R, D]
  const long long* given_up; // [1]; nothing is moved where it is not 0
  int num_places;
  int ep_size;
  int rank;
  Ring ring;
};

struct alignas(16) PullMessage {
  int rows[TOP_K];
  int chunk;  // below 0: there is no more
};

struct Unit {
  int slots[TOP_K];
  const char* row;
};

// Unit number i of a block that has every `num_blocks`-th one.
INLINE void look_up(const PullArguments& a, long long number, Unit& unit) {
  const long long flat = blockIdx.x + number * gridDim.x;
  if (flat >= (long long)a.num_places * a.ep_size) {
    no_slots(unit.slots);
    unit.row = nullptr;
    return;
  }
  const u32 at = (u32)flat, token = at / a.ep_size, turn = (token * a.ep_size) / gridDim.x;
  const u32 from_rank = (a.rank + 1 + at % a.ep_size + turn) % a.ep_size;
  load_slots(a.row_of_slot + ((long long)from_rank * a.num_places + token) * TOP_K, unit.slots);
  unit.row = (const char*)__ldg(a.rows_table + from_rank) + (long long)token * a.ring.row_bytes;
}

INLINE bool is_wanted(const Unit& unit) {
  int last = -1;
#pragma unroll
  for (int slot = 0; slot < TOP_K; ++slot) last = max(last, unit.slots[slot]);
  return last >= 0;
}

INLINE void fill_stages(const PullArguments& a, char* shared) {
  const Ring ring = a.ring;
  u64 *full = full_of(shared, ring), *empty = empty_of(shared, ring);
  PullMessage* messages = (PullMessage*)messages_of(shared, ring);
  const int lane = threadIdx.x % 32;
  const long long total = (long long)a.num_places * a.ep_size;
  Place place = {0, 1};  // a stage that was never filled counts as emptied
  Unit next;
  look_up(a, lane, next);
  for (long long number = 0; blockIdx.x + number * gridDim.x < total; number += 32) {
    const Unit unit = next;
    look_up(a, number + 32 + lane, next);
    for (u32 wanted = __ballot_sync(EVERY_LANE, is_wanted(unit)); wanted; wanted &= wanted - 1) {
      const int chosen = __ffs(wanted) - 1;
      for (int chunk = 0; chunk < ring.num_chunks; ++chunk) {
        wait(empty + place.stage, place.parity);
        if (lane == chosen) {
          PullMessage& message = messages[place.stage];
#pragma unroll
          for (int slot = 0; slot < TOP_K; ++slot) message.rows[slot] = unit.slots[slot];
          message.chunk = chunk;
          const int bytes = bytes_of_chunk(ring, chunk);
          arrive_expecting(full + place.stage, bytes);
          load_bulk(shared + place.stage * ring.stage_bytes, unit.row + chunk * ring.chunk_bytes, bytes,
                    full + place.stage);
        }
        __syncwarp();
        place = further(place, 1, ring.num_stages);
      }
    }
  }
  for (int warp = 0; warp < STORE_WARPS; ++warp) {
    wait(empty + place.stage, place.parity);
    if (lane == 0) {
      messages[place.stage].chunk = -1;
      arrive(full + place.stage);
    }
    __syncwarp();
    place = further(place, 1, ring.num_stages);
  }
}

INLINE void store_stages(const PullArguments& a, char* shared, int first) {
  const Ring ring = a.ring;
  u64 *full = full_of(shared, ring), *empty = empty_of(shared, ring);
  const PullMessage* messages = (const PullMessage*)messages_of(shared, ring);
  const int lane = threadIdx.x % 32;
  Place place = {first, 0}, being_read = place;
  for (int count = 0;; ++count) {
    wait(full + place.stage, place.parity);
    const PullMessage& message = messages[place.stage];
    const int chunk = message.chunk;
    if (chunk < 0) break;
    for (int slot = lane; slot < TOP_K; slot += 32) {
      const int row = message.rows[slot];
      if (row >= 0)
        store_bulk(a.out + (long long)row * ring.row_bytes + chunk * ring.chunk_bytes,
                   shared + place.stage * ring.stage_bytes, bytes_of_chunk(ring, chunk));
    }
    close_group();
    place = further(place, STORE_WARPS, ring.num_stages);
    if (count >= PENDING) {
      wait_until_read<PENDING>();
      __syncwarp();
      if (lane == 0) arrive(empty + being_read.stage);
      being_read = further(being_read, STORE_WARPS, ring.num_stages);
    }
  }
  wait_until_stored();
}

extern "C" __global__ void __launch_bounds__(32 + 32 * STORE_WARPS, 1)
    pull_rows(const __grid_constant__ PullArguments a) {
  SHARED_MEMORY(shared);
  if (__syncthreads_or(*a.given_up != 0)) return;
  start_ring(shared, a.ring, 1);
  if (threadIdx.x < 32)
    fill_stages(a, shared);
  else
    store_stages(a, shared, threadIdx.x / 32 - 1);
}
"""
)

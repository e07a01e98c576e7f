"""The bulk-copy kernels compile with NVRTC, fit into shared memory, and move rows on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux only")


from crossdock.kernels import bulk_rows, cuda_source
from crossdock.kernels.bulk_rows import Tuning, pull_ring, pull_source, why_not
from crossdock.kernels.cuda_source import CannotRun, Source, compiled

_SOURCES = [
    pull_source(8, Tuning()),
    pull_source(7, Tuning(store_warps=2, pending=2)),
]


def _compiled(source: Source) -> bytes:
    try:
        return compiled(source, "sm_90")
    except CannotRun as error:
        if "was not found" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: f"{source.name}-{source.defines}")
def test_compiles_with_nvrtc(source: Source):
    assert source.name.encode() in _compiled(source)


@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: f"{source.name}-{source.defines}")
def test_compiles_for_hopper_without_spilling(source: Source, tmp_path: Path):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc, which tells of registers and spills")
    (tmp_path / "kernel.cu").write_text(source.text)
    told = subprocess.run(
        [
            *(compiler, "-cubin", "-gencode=arch=compute_90,code=sm_90", "-Xptxas=-v", "-std=c++17", "--fmad=false"),
            *(f"-D{name}={value}" for name, value in source.defines),
            *(str(tmp_path / "kernel.cu"), "-o", str(tmp_path / "kernel.cubin")),
        ],
        check=True, capture_output=True, text=True, timeout=110,
    ).stderr  # fmt: skip
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told
    assert "warning" not in told


def test_what_does_not_compile_says_so():
    source = Source("nothing", "missing", ())
    _compiled(_SOURCES[0])
    with pytest.raises(CannotRun, match="NVRTC does not compile missing for sm_90: missing.cu"):
        compiled(source, "sm_90")


def test_without_nvrtc_the_places_are_told(monkeypatch):
    monkeypatch.setattr(cuda_source, "_places_of_nvrtc", lambda: iter(["/nowhere/libnvrtc.so.13", "libnowhere.so"]))
    cuda_source._nvrtc.cache_clear()
    try:
        with pytest.raises(CannotRun, match="was not found: tried /nowhere/libnvrtc.so.13, libnowhere.so"):
            cuda_source._nvrtc()
    finally:
        cuda_source._nvrtc.cache_clear()


def test_a_cpu_is_refused():
    assert why_not(torch.device("cpu"), torch.bfloat16, 64, 2, 2) == "bulk copies need an NVIDIA GPU; this is cpu"


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden_dim", "top_k", "ep_size", "reason"),
    [
        ((8, 0), torch.bfloat16, 64, 2, 2, "bulk copies need compute capability 9.0; this GPU has 8.0"),
        ((9, 0), torch.bfloat16, 60, 2, 2, "bulk copies need rows of a multiple of 16 bytes; these have 120"),
        ((9, 0), torch.bfloat16, 64, 33, 2, "up to 32 ranks and 32 slots a token; here are 2 and 33"),
        ((9, 0), torch.bfloat16, 64, 2, 33, "up to 32 ranks and 32 slots a token; here are 33 and 2"),
    ],
)
def test_what_cannot_be_served_is_told(monkeypatch, capability, dtype, hidden_dim, top_k, ep_size, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    told = why_not(torch.device("cuda", 0), dtype, hidden_dim, top_k, ep_size)
    assert told is not None
    assert reason in told


_ROWS = [16, 128, 4096, 5760, 14336, 14352, 28672, 57344, 1 << 20]


@pytest.mark.parametrize("row_bytes", _ROWS)
@pytest.mark.parametrize("slots", [1, 8, 32])
def test_rings_fit(row_bytes: int, slots: int):
    tuning = Tuning()
    ring, message_bytes = pull_ring(row_bytes, slots, tuning), -(-4 * (slots + 1) // 16) * 16
    assert tuning.store_warps * (tuning.pending + 2) <= ring.num_stages <= 64
    assert ring.num_stages * (ring.stage_bytes + 16 + message_bytes) <= 200 * 1024
    assert ring.chunk_bytes <= ring.stage_bytes
    assert ring.chunk_bytes % 16 == ring.stage_bytes % 128 == 0
    assert (ring.num_chunks - 1) * ring.chunk_bytes < row_bytes <= ring.num_chunks * ring.chunk_bytes


def _hopper() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_not(device, torch.bfloat16, 64, 8, 2):
        pytest.skip(reason)
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("num_blocks", [1, 7, 132])
@pytest.mark.parametrize("hidden_dim", [8, 2880, 7168, 28672])
def test_pulls_on_a_gpu(num_blocks: int, hidden_dim: int):
    device, (ep_size, num_places, top_k) = _hopper(), (2, 131, 8)
    rows = [torch.randn(num_places, hidden_dim, device=device).to(torch.bfloat16) for _ in range(ep_size)]
    table = torch.tensor([part.data_ptr() for part in rows], device=device)
    wanted = torch.rand(ep_size, num_places, top_k, device=device) < 0.2
    num_rows = int(wanted.sum())
    row_of_slot = torch.full(wanted.shape, -1, dtype=torch.int32, device=device)
    row_of_slot[wanted] = torch.randperm(num_rows, device=device).to(torch.int32)
    out = torch.zeros(num_rows, hidden_dim, dtype=torch.bfloat16, device=device)
    given_up = torch.ones(1, dtype=torch.int64, device=device)
    bulk_rows.launch_bulk_pull_rows(table, row_of_slot, 1, out, given_up, num_blocks)
    assert not out.any()
    bulk_rows.launch_bulk_pull_rows(table, row_of_slot, 1, out, given_up.zero_(), num_blocks)
    from_rank, token, _ = wanted.nonzero(as_tuple=True)
    expected = torch.empty_like(out)
    expected[row_of_slot[wanted].long()] = torch.stack(rows)[from_rank, token]
    assert torch.equal(out, expected)

"""The trained model as one safetensors file of whole tensors, whatever the number of ranks that wrote or read it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .model import Transformer
from .parallel import gathered
from .settings import ModelSizes


def whole_state(model: Transformer) -> dict[str, Tensor]:
    """All parameters and buffers on the CPU, experts of all ranks joined by id; every rank takes part."""
    return {
        name: (torch.cat(gathered(tensor)) if ".experts." in name else tensor).detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }


def save(path: Path, state: dict[str, Tensor], sizes: ModelSizes) -> None:
    """Write the file, with the model's sizes in its metadata."""
    save_file(state, path, metadata={"sizes": json.dumps(asdict(sizes))})


def load(path: Path) -> tuple[dict[str, Tensor], ModelSizes]:
    """Read the file back: tensors and the model's sizes."""
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        return state, ModelSizes(**json.loads(file.metadata()["sizes"]))


def load_into(model: Transformer, state: dict[str, Tensor]) -> None:
    """Copy whole tensors into a model whose dispatcher spans one rank or many; each takes its own experts."""
    own = {}
    for name, tensor in model.state_dict().items():
        whole = state[name]
        first = model.first_expert_id if ".experts." in name else 0
        own[name] = whole[first : first + tensor.shape[0]]
    model.load_state_dict(own)

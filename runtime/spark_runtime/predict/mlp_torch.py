"""Training of :class:`spark_runtime.predict.mlp.Network` with PyTorch, on a GPU or the CPU.

Needs the extra ``predict``; nothing else here imports it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_runtime.predict.losses import LossName
from spark_runtime.predict.mlp import Features, Network, Training, batches, learning_rate

__all__ = ["TorchMissingError", "check_device", "cuda_is_there", "train"]


class TorchMissingError(RuntimeError):
    """PyTorch is not installed, or has no GPU that was asked for."""


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError("PyTorch is not installed") from error
    return torch


def check_device(device: str) -> None:
    """Raise :class:`TorchMissingError` unless networks can be trained on ``cpu`` or ``cuda``."""
    if not _torch().cuda.is_available() and device == "cuda":
        raise TorchMissingError("PyTorch finds no GPU")


def cuda_is_there() -> bool:
    """Whether PyTorch is installed and has a GPU."""
    try:
        return bool(_torch().cuda.is_available())
    except TorchMissingError:
        return False


def train(network: Network, name: LossName, data: Features, n_tokens: int, training: Training, device: str) -> Network:
    """The network after training; the numbers differ from NumPy's by rounding alone.

    Raises :class:`TorchMissingError`.
    """
    check_device(device)
    torch = _torch()

    def tensor(array: NDArray[np.float32]) -> Any:
        return torch.from_numpy(np.array(array)).to(device)

    center, scale = tensor(network.center), tensor(network.scale)
    trained = [tensor(array).requires_grad_() for array in network.trained]
    optimiser = torch.optim.Adam([array for array in trained if array.numel()], lr=training.rate)
    for step, places in batches(n_tokens, training):
        features, selected = (tensor(array) for array in data(places))
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, n_tokens, training)
        hidden_weights, hidden_bias, weights, bias = trained
        after = (features - center) / scale
        if training.width:
            after = torch.nn.functional.gelu(after @ hidden_weights + hidden_bias, approximate="tanh")
        scores = after @ weights + bias
        optimiser.zero_grad()
        _loss(torch, name, scores, selected).backward()
        optimiser.step()
    return network.with_trained([array.detach().cpu().numpy() for array in trained])


def _loss(torch: Any, name: LossName, scores: Any, selected: Any) -> Any:
    """As in ``losses``, for automatic differentiation."""
    functional = torch.nn.functional
    if name == "bce":
        return functional.binary_cross_entropy_with_logits(scores, selected)
    if name == "listnet":
        return functional.cross_entropy(scores, selected / selected.sum(dim=1, keepdim=True))
    places = selected.topk(int(selected[0].sum())).indices
    above = scores[:, None, :] - scores.gather(1, places)[:, :, None]
    others = (1 - selected)[:, None, :]
    return (functional.softplus(above) * others).sum() / (others.sum() * places.shape[1])

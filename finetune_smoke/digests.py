"""64-bit digests of tensors, files and bytes, with which ranks compare what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import torch

BLOCK_BYTES = 1 << 26


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A 64-bit digest of all bits of ``tensors`` in order; computed on their device, with one wait for the result."""
    sums = torch.stack([_fingerprint(block) for block in _blocks(tensors)])
    return digest_bytes(sums.cpu().numpy().tobytes())


@torch.no_grad()
def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A 64-bit number for each tensor, on its device, without waiting for it."""
    return torch.stack([_fingerprint(_bytes(tensor)) for tensor in tensors])


def _fingerprint(content: torch.Tensor) -> torch.Tensor:
    """The sum of w_i * m_i modulo 2^64 over the 32-bit words w_i, with m_i odd and mixed from i. Any changed bit changes it.

    64-bit words would not do: times an odd number their highest bits all weigh 2^63, and any two such flips would cancel.
    Nor would m_i = 2 i + 1: flips at four places can cancel. The mixing is SplitMix64's (Steele, Lea and Flood 2014).
    """
    words = torch.nn.functional.pad(content, (0, -content.numel() % 4)).view(torch.int32)
    mixed = torch.arange(1, words.numel() + 1, device=words.device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (words * ((mixed ^ (mixed >> 31)) | 1)).sum()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of ``tensors`` in blocks of at most 64 MiB; small tensors share a block, large ones are split."""
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        for part in torch.split(_bytes(tensor), BLOCK_BYTES):
            if size + part.numel() > BLOCK_BYTES:
                yield torch.cat(waiting)
                waiting, size = [], 0
            waiting.append(part)
            size += part.numel()
    if waiting:
        yield torch.cat(waiting)


def as_hex(number: int) -> str:
    """A 64-bit digest as 16 hex digits, as markers and RESULT have it."""
    return f"{number % 2**64:016x}"


def file_digest(file: BinaryIO, size_bytes: int) -> str:
    """``digest_bytes`` of the first ``size_bytes`` of an open file, as hex; needs no memory, whatever its size."""
    found = hashlib.sha256()
    while size_bytes > 0 and (block := file.read(min(1 << 20, size_bytes))):
        found.update(block)
        size_bytes -= len(block)
    return found.hexdigest()[:16]


def digest_bytes(content: bytes) -> int:
    """The first 64 bits of SHA-256, as a signed number."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)

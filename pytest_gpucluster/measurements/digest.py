"""Silent data corruption: the same work again and again, and whether every bit of its result is the same.

**Work.** Matrix products, attention, softmax and sums of seeded inputs, each by a kernel that repeats bit for bit: cuBLAS
promises that for one toolkit, one architecture, one number of SMs and one stream (with ``CUBLAS_WORKSPACE_CONFIG``, which
torch insists on here), the forward of FlashAttention has no atomics, and torch's softmax and sums have a fixed order.
Left out because they do not repeat: the backward of attention (atomic adds), scatter and ``index_add`` (atomic adds),
cuDNN's attention and autotuned kernels (the choice may differ between two GPUs), anything over several streams.

**Inputs** are made on the device from the seed by integer arithmetic alone (SplitMix64 of the element's index), then
brought to floats by steps that IEEE 754 leaves no choice in. So they are bit for bit the same on every GPU, on the CPU,
and under any driver or torch. ``torch.randn`` is not: on a GPU the order of its numbers depends on the number of SMs and their
last bits on a logarithm and a cosine, on a CPU on the vector unit. And a GPU that makes its inputs wrong is found as well.

**Digest.** See :func:`fingerprint`. It is made on the device over all bytes; only it leaves the device.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from pytest_gpucluster.inventory.telemetry import Sampler, Watched
from pytest_gpucluster.measurements import gemm, progress, timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by
from pytest_gpucluster.text import counted

Draw: TypeAlias = Callable[..., torch.Tensor]
Work: TypeAlias = Callable[[], torch.Tensor]

HEADS, HEAD_SIZE = 16, 128
SIZE_STEP = 16
"""Sizes are multiples of this: the float8 product wants whole 16-byte rows."""

BLOCK = 1 << 18
"""32-bit words, 1 MiB, that one pair of sums stands for."""
ROUNDS_LISTED, ROUNDS_SHOWN = 100, 5
"""Most differing rounds that the result lists by number, and that a message shows; all are counted."""
SAMPLES = 20_000
"""Telemetry samples of a long run, about."""

GOLDEN = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele, Lea and Flood 2014)."""
FIELDS, FIELD_BITS = 3, 21
"""The sum of 3 uniform numbers of 21 bits is near enough to normal, has a variance of 2^40 and fits float32 exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests(Watched):
    """Digests of what one device computed; two healthy devices of one ``model`` have equal ``digests``.

    ``digests`` holds the first round's digest by kind, ``differing`` in how many later rounds a kind had another one (0
    where all is well), ``differing_rounds`` the first :data:`ROUNDS_LISTED` of these. Of ``rounds``, which count from 0, the
    last ``hot_rounds`` ran right after products had heated the device. ``excluded``: requested kinds that cannot
    run here, with the reason. ``model``: what the bits may depend on besides the inputs. ``telemetry`` covers the hot
    rounds, or all rounds if none were hot; None without NVML.
    """

    digests: dict[str, str]
    rounds: int
    hot_rounds: int
    differing: dict[str, int]
    differing_rounds: dict[str, list[int]]
    excluded: dict[str, str]
    seconds: float
    model: str
    device: str

    @property
    def unsteady(self) -> dict[str, str]:
        """The kinds of work that did not repeat, each with the number and the first of such rounds; empty if all repeated."""
        return {
            kind: f"{count} of {self.rounds} rounds are not like the first: {_some(self.differing_rounds[kind])}"
            for kind, count in self.differing.items()
            if count
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A planted fault: bit ``bit`` of the output of ``kind`` is flipped before its digest is made.

    In round ``round`` (None: in every one), on rank ``rank`` (None: on every one).
    """

    kind: str
    bit: int
    round: int | None = None
    rank: int | None = None

    def is_in(self, kind: str, index: int) -> bool:
        """Whether kind, round and rank match."""
        here = self.rank is None or str(self.rank) == os.environ.get("RANK")
        return here and self.kind == kind and self.round in (None, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestKind:
    """One kind of work: the function that prepares it for a size, and the compute capability that it needs."""

    prepare: Callable[[int, Draw], Work]
    capability: tuple[int, int]


def _bf16(size: int, draw: Draw) -> Work:
    a, b = (draw(size, size).bfloat16() for _ in range(2))
    return lambda: a @ b


def _fp8(size: int, draw: Draw) -> Work:
    a, b = (draw(size, size).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: SLF001 - torch's only float8 product


def _fp32(size: int, draw: Draw) -> Work:
    a, b = draw(size, size), draw(size, size)
    return lambda: a @ b


def _attention(size: int, draw: Draw) -> Work:
    query, key, value = (draw(1, HEADS, size, HEAD_SIZE).bfloat16() for _ in range(3))

    def work() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value)

    return work


def _softmax(size: int, draw: Draw) -> Work:
    rows = draw(size, size)
    return lambda: rows.softmax(dim=1)


def _reduction(size: int, draw: Draw) -> Work:
    rows = draw(size, size)
    return lambda: torch.cat([rows.sum(dim=0), rows.sum(dim=1), rows.sum().reshape(1)])


KINDS: Mapping[str, DigestKind] = {
    "bf16": DigestKind(prepare=_bf16, capability=(8, 0)),
    "fp8": DigestKind(prepare=_fp8, capability=(8, 9)),
    "fp32": DigestKind(prepare=_fp32, capability=(0, 0)),
    "attention": DigestKind(prepare=_attention, capability=(8, 0)),
    "softmax": DigestKind(prepare=_softmax, capability=(0, 0)),
    "reduction": DigestKind(prepare=_reduction, capability=(0, 0)),
}
"""bfloat16, float8 (e4m3, fast accumulation, bfloat16 output) and float32 (never TF32) products of order ``size``; the
forward of FlashAttention over ``size`` tokens; softmax of the rows, and sums of rows, columns and all, of a float32 matrix."""


def _simulated(call: Simulated) -> Digests:
    """Digests of seeded work, equal on all GPUs; one kind is another on a GPU that computes wrong bits."""
    bad = call.has("corrupt")
    found = {kind: hashlib.sha256(f"{kind}{bad and kind == 'fp32'}".encode()).hexdigest()[:48] for kind in KINDS}
    rounds = call.kwargs.get("rounds", 10)
    return Digests(
        digests=found,
        rounds=rounds,
        hot_rounds=rounds // 2,
        differing=dict.fromkeys(KINDS, 0),
        differing_rounds={kind: [] for kind in KINDS},
        excluded={},
        seconds=20.0,
        model=f"simulated {call.device}",
        device=call.device,
        telemetry=call.telemetry(),
    )


@simulated_by(_simulated)
def digests(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    *,
    rounds: int,
    size: int,
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    seconds: float | None = None,
    heat_s: float = 0.0,
    flips: Sequence[Mapping[str, Any]] = (),
) -> Digests:
    """Do all ``kinds`` of work ``rounds`` times on the current device and compare each result with the first round's.

    Args:
        rounds: how often, at least.
        size: order of the matrices and tokens of attention, a multiple of :data:`SIZE_STEP`.
        seed: of the inputs.
        kinds: which of :data:`KINDS`.
        seconds: go on for so long; None: ``rounds`` are enough.
        heat_s: after ``rounds`` cold ones, seconds of back-to-back bfloat16 products, and at once ``rounds`` (or
            ``seconds``) more. 0: no heat, no more rounds.
        flips: faults to plant, the fields of a :class:`Flip` each; for tests and self-tests.

    Raises:
        ValueError: an unknown kind, no kind, a size or a number that cannot be; a flip that would never happen.
        RuntimeError: none of the kinds can run here; on a GPU, ``CUBLAS_WORKSPACE_CONFIG`` is not set.
    """
    planted = [Flip(**flip) for flip in flips]
    _require(kinds, rounds, size, planted, last=None if seconds else rounds * (2 if heat_s > 0 else 1) - 1)
    excluded = {kind: reason for kind in kinds if (reason := _why_excluded(KINDS[kind].capability, kind))}
    start_s = time.perf_counter()
    with _repeatable():
        works = {kind: KINDS[kind].prepare(size, _drawing(seed, kind)) for kind in kinds if kind not in excluded}
        if not works:
            raise RuntimeError(f"nothing to compute: {excluded}")
        work = _Rounds(works=works, weights=weights(timing.current_device()), flips=planted)
        if heat_s > 0:
            work.run(rounds, seconds=0.0)
            progress.report(f"heating for {heat_s:g} s")
            timing.keep_busy(gemm.bf16_product(size), seconds=heat_s)
        cold = work.rounds
        interval_s = max(0.1, (seconds or 0.0) / SAMPLES)
        with Sampler(timing.gpu_uuid(), interval_s=interval_s) as sampler:
            work.run(rounds, seconds=seconds or 0.0)
    return Digests(
        digests={kind: _text(*first) for kind, first in work.first.items()},
        rounds=work.rounds,
        hot_rounds=work.rounds - cold if heat_s > 0 else 0,
        differing={kind: work.differing[kind] for kind in work.first},
        differing_rounds=work.listed,
        excluded=excluded,
        seconds=time.perf_counter() - start_s,
        model=_model(),
        device=timing.device_name(),
        telemetry=sampler.summary(),
    )


def fingerprint(content: torch.Tensor, weighing: torch.Tensor) -> torch.Tensor:
    """Two 64-bit sums for each block of :data:`BLOCK` words of ``content`` (bytes), made on its device.

    Content is read as 32-bit words x_i (signed, the last one filled up with zeros), and each sum is that of w_i x_i modulo
    2^64 with odd 64-bit weights w_i, other ones for the second sum. Integer sums do not depend on their order.

    *One flipped bit* changes x_i by 2^k with k <= 31, so the sum by w_i 2^k, which is not 0 modulo 2^64 for an odd w_i: it
    is seen for certain. So does the sum of all blocks' first sums, the first 16 digits of the digest: certain as well.

    *Any other change* has in some block a word that differs by an odd multiple of 2^k, again k <= 31. Whatever the other
    words of that block do, a sum stays the same for at most one value of the low 64 - k bits of this word's weight. At
    least 2^32 odd values were possible, so one sum misses the change with a probability of at most 2^-32 and both with
    2^-64, over the choice of weights, of which no fault knows. The hash of all blocks' sums adds 2^-128.

    Words of 64 bits would not do: flips of the top bit of any two of them cancel under every choice of odd weights.
    """
    words = pad(content, (0, -content.numel() % 4)).view(torch.int32)
    whole = words.numel() // BLOCK * BLOCK
    parts = [part for part in (words[:whole].view(-1, BLOCK), words[whole:].view(1, -1)) if part.numel()]
    return torch.stack([torch.cat([(part * weight[: part.shape[1]]).sum(dim=1) for part in parts]) for weight in weighing])


def weights(device: torch.device) -> torch.Tensor:
    """The two rows of odd 64-bit weights for :func:`fingerprint`."""
    return _random_words(2 * BLOCK, key=_key("weights"), device=device).bitwise_or_(1).view(2, BLOCK)


def normal(*shape: int, key: int, device: torch.device) -> torch.Tensor:
    """Float32 numbers of mean 0 and variance 1 within 3 of it, the same bits everywhere; see the module's docstring."""
    words = _random_words(math.prod(shape), key=key, device=device)
    total = torch.zeros_like(words)
    for part in range(FIELDS):
        total += (words >> (part * FIELD_BITS)) & ((1 << FIELD_BITS) - 1)
    unit = 1 << (FIELD_BITS - 1)
    return ((total - FIELDS * unit).float() / unit).view(shape)


@dataclass(slots=True, kw_only=True)
class _Rounds:
    """All works in turn, again and again; the first round's sums by kind, and which rounds differed from them."""

    works: Mapping[str, Work]
    weights: torch.Tensor
    flips: Sequence[Flip]
    rounds: int = 0
    first: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    differing: Counter[str] = field(default_factory=Counter)
    listed: dict[str, list[int]] = field(default_factory=dict)

    def run(self, rounds: int, *, seconds: float) -> None:
        """At least ``rounds`` more rounds, for at least ``seconds``; one wait for the device in each."""
        start_s = time.perf_counter()
        for done in itertools.count():
            elapsed_s = time.perf_counter() - start_s
            if done >= rounds and elapsed_s >= seconds:
                return
            progress.report(f"round {self.rounds}", min(done / rounds, elapsed_s / seconds if seconds else 1.0))
            for kind, (sums, num_bytes) in self._round().items():
                first_sums, first_bytes = self.first.setdefault(kind, (sums, num_bytes))
                if num_bytes != first_bytes or not torch.equal(sums, first_sums):
                    self.differing[kind] += 1
                    if len(self.listed.setdefault(kind, [])) < ROUNDS_LISTED:
                        self.listed[kind].append(self.rounds)
            self.rounds += 1

    def _round(self) -> dict[str, tuple[torch.Tensor, int]]:
        """One more round: the sums (on the CPU) and the number of bytes that they stand for, by kind."""
        made = {kind: self._sums(kind, work) for kind, work in self.works.items()}
        read = torch.cat([sums.flatten() for sums, _ in made.values()]).cpu()
        parts = torch.split(read, [sums.numel() for sums, _ in made.values()])
        return {kind: (part.view(2, -1), num_bytes) for part, (kind, (_, num_bytes)) in zip(parts, made.items(), strict=True)}

    def _sums(self, kind: str, work: Work) -> tuple[torch.Tensor, int]:
        output = work()
        content = _bytes(output)
        for flip in self.flips:
            if flip.is_in(kind, self.rounds):
                _flip(content, flip.bit)
        sums = fingerprint(content, self.weights)
        for memory in (content, output):
            memory.zero_()  # the next output may get it: where a kernel writes nothing, it must not find what is right
        return sums, content.numel()


def _some(rounds: Sequence[int]) -> str:
    shown = ", ".join(map(str, rounds[:ROUNDS_SHOWN]))
    return f"{shown}, .." if len(rounds) > ROUNDS_SHOWN else shown


def _require(kinds: Sequence[str], rounds: int, size: int, flips: Sequence[Flip], *, last: int | None) -> None:
    """Refuse wrong arguments; ``last`` is the last round's index, None if time decides."""
    unknown = sorted({*kinds, *(flip.kind for flip in flips)} - set(KINDS))
    if unknown:
        raise ValueError(f"unknown kinds {', '.join(unknown)}; valid: {', '.join(KINDS)}")
    if not kinds or rounds < 1:
        raise ValueError(f"at least one kind and one round are needed, not {list(kinds)} and {rounds}")
    if size < SIZE_STEP or size % SIZE_STEP:
        raise ValueError(f"size must be a multiple of {SIZE_STEP}, not {size}")
    for flip in flips:
        too_late = last is not None and flip.round is not None and flip.round > last
        if flip.kind not in kinds or flip.bit < 0 or too_late:
            raise ValueError(f"a flip that cannot happen: {flip}")


def _why_excluded(capability: tuple[int, int], kind: str) -> str | None:
    """Why the current device cannot do this kind of work; None if it can."""
    if torch.cuda.is_available():
        own = torch.cuda.get_device_capability()
        if own < capability:
            return f"needs compute capability {_dotted(capability)}, {timing.device_name()} has {_dotted(own)}"
    elif kind == "fp8" and not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"):  # noqa: SLF001 - nothing public says so
        return f"torch {torch.__version__} has no float8 product for CPUs"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _model() -> str:
    """All that the bits may depend on: cuBLAS repeats for one version, one architecture and one number of SMs."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        hardware = f"{properties.name}, {counted(properties.multi_processor_count, 'SM')}, CUDA {torch.version.cuda}"
    else:
        hardware = f"CPU, {torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}"
    return f"{hardware}, torch {torch.__version__}"


@contextmanager
def _repeatable() -> Iterator[None]:
    """Allow only kernels that repeat bit for bit, and float32 products in float32; restore the settings at the end."""
    mode, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        with gemm.at_precision("highest"):
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _flip(content: torch.Tensor, bit: int) -> None:
    if bit >= 8 * content.numel():
        raise ValueError(f"there is no bit {bit} in {content.numel()} bytes")
    content[bit // 8].bitwise_xor_(1 << bit % 8)


def _text(sums: torch.Tensor, num_bytes: int) -> str:
    """The digest: the sum of the first sums, then a hash of all of them and of the number of bytes."""
    total = int(sums[0].sum()) % 2**64
    content = sums.numpy().tobytes() + num_bytes.to_bytes(8, "little")
    return f"{total:016x}{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _drawing(seed: int, kind: str) -> Draw:
    """Draws the inputs of ``kind`` one after the other; they do not depend on which other kinds there are."""
    number = itertools.count()
    device = timing.current_device()
    return lambda *shape: normal(*shape, key=_key(f"{seed} {kind} {next(number)}"), device=device)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _random_words(count: int, *, key: int, device: torch.device) -> torch.Tensor:
    """Outputs 0 to ``count - 1`` of SplitMix64 with state ``key``: wrapping 64-bit integers, exact on every device."""
    words = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    words.mul_(_signed(GOLDEN)).add_(_signed(key))
    for shift, factor in MIXERS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Each word to the right by so many bits, with zeros coming in; torch's own shift repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word

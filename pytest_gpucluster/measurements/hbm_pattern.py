"""Pattern test of the current device's memory: write, read back and compare every bit, all on the device.

Blocks are written in one order over the whole memory before any is read back, so that what is read comes from the
memory and not from a cache. Three kinds of pattern:

* ``moving inversions``: a pattern everywhere; upwards check each block and write its complement; downwards check that
  and write the pattern again; check once more. So each block changes while its neighbours hold the opposite.
* ``walking bits``: one bit set, then one bit clear, which moves on by one place from word to word; in 64 steps every bit
  of every word is visited.
* ``random``: 64-bit random words from a seeded generator, and their complement; to compare, they are drawn again. No
  two blocks hold the same, so a word that was stored under a wrong address shows.

"Up" and "down" are virtual addresses, block by block; the hardware spreads them over its channels. With ECC on, the
hardware corrects single bits before this test reads them, and an error that it cannot correct ends the process. So this
test finds what ECC missed; read the ECC counters too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pytest_gpucluster.inventory.telemetry import Sampler, Watched
from pytest_gpucluster.measurements import hbm, progress, timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by

ROW = 64
"""Words of 8 bytes in a row: the bit that walks is back where it began after one row."""
ROW_BYTES = 8 * ROW
INVERTED = (
    0x0000000000000000,
    0x5555555555555555,
    0x3333333333333333,
    0x0F0F0F0F0F0F0F0F,
    0x00FF00FF00FF00FF,
    0x0000FFFF0000FFFF,
    0x00000000FFFFFFFF,
)
"""With their complements, every two bits of a word once differ and once agree."""
CHECK_TRAFFIC = 1.25
"""Bytes moved to compare a byte with a row: read it, write a mask of an eighth, read that."""
FIRST_ERRORS = 16
SLICE_ROWS = 1 << 18
"""Rows of a block in which errors are looked for at once, which bounds the memory that takes."""
GUESS_TB_S = 4.0
"""The rate behind ``expected_s``, about an H200's."""
CPU_LIMIT_BYTES = 1 << 26
"""What is tested on a CPU where no limit is given: its memory belongs to others, too."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternError:
    """One 8-byte word that was not what had been written.

    ``offset_bytes`` counts from the start of block number ``block``, ``device_pointer`` is its virtual address. ``found``
    is the word read once more: where it equals ``expected`` (and ``wrong_bits`` is empty) the reading was wrong, or the
    comparison, and not what is stored. Bit 0 is the lowest.
    """

    kind: str
    step: str
    block: int
    offset_bytes: int
    device_pointer: str
    expected: str
    found: str
    wrong_bits: list[int]

    @property
    def text(self) -> str:
        """The error in one line."""
        bits = ", ".join(map(str, self.wrong_bits)) or "none when read again"
        return (
            f"{self.kind}, {self.step}: block {self.block} + {self.offset_bytes} bytes ({self.device_pointer}): "
            f"expected {self.expected}, found {self.found}, wrong bits: {bits}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternResult(Watched):
    """What the pattern test found; ``errors`` counts wrong words over all comparisons, so one bad bit counts often.

    ``first_errors`` are the first 16 of them. ``share_of_free`` and ``share_of_total`` say how much of the memory was
    tested: ``tested_bytes`` over what was free before, and over all there is. ``moved_bytes`` is the traffic,
    ``tb_s`` its rate, ``expected_s`` the time it would take at 4 TB/s. ``telemetry`` is of the whole test, None without NVML.
    """

    errors: int
    errors_by_kind: dict[str, int]
    first_errors: list[PatternError]
    tested_bytes: int
    free_bytes: int
    total_bytes: int
    share_of_free: float
    share_of_total: float
    seconds: float
    expected_s: float
    moved_bytes: int
    tb_s: float
    device: str


@dataclass(frozen=True, slots=True)
class _Room:
    """Sizes of the tested memory, of one block, and of the free and total memory."""

    tested_bytes: int
    block_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _Memory:
    """The blocks under test (rows of 64 words), and the buffers to compare one block: drawn words and a mask of errors."""

    blocks: list[torch.Tensor]
    drawn: torch.Tensor
    wrong: torch.Tensor


@dataclass(slots=True)
class _Errors:
    """Errors and traffic of a search so far; the object outlives the searched memory."""

    errors_by_kind: dict[str, int] = field(default_factory=dict)
    first_errors: list[PatternError] = field(default_factory=list)
    moved_bytes: int = 0


class _Search:
    """Writes and checks blocks; counts traffic and errors in ``found``."""

    def __init__(self, memory: _Memory, found: _Errors, *, flip: int | None, expected_bytes: int) -> None:
        self.up = range(len(memory.blocks))
        """Numbers of the blocks, lowest address first."""
        self.down = self.up[::-1]
        self._memory = memory
        self._found = found
        self._flip = flip
        self._unplanted: int | None = None
        self._expected_bytes = expected_bytes
        self._kind = ""
        self._seed = 0
        self._generator = torch.Generator(memory.drawn.device)

    def begin(self, kind: str, *, test: int) -> None:
        """Errors found from now on belong to this kind; its random numbers to pass number ``test``."""
        self._kind = kind
        self._found.errors_by_kind.setdefault(kind, 0)
        self._seed = test * len(self._memory.blocks)  # small: torch's CPU generator takes 32 bits of it
        self._unplanted = self._flip

    def say(self, step: str) -> None:
        """Report how far the whole test is."""
        progress.report(f"{self._kind}: {step}", min(1.0, self._found.moved_bytes / self._expected_bytes))

    def row(self, words: Sequence[int]) -> torch.Tensor:
        """One row of these unsigned words on the device."""
        signed = [word - 2**64 if word >= 2**63 else word for word in words]
        return torch.tensor(signed, dtype=torch.int64, device=self._memory.drawn.device)

    def draw(self, index: int, *, inverted: bool) -> torch.Tensor:
        """The random words that belong into a block, or their complement."""
        block = self._memory.blocks[index]
        drawn = self._memory.drawn[: len(block)]
        self._generator.manual_seed(self._seed + index)
        drawn.random_(-(2**63), None, generator=self._generator)
        if inverted:
            torch.bitwise_not(drawn, out=drawn)
        self._found.moved_bytes += (3 if inverted else 1) * block.nbytes
        return drawn

    def write(self, index: int, words: torch.Tensor) -> None:
        """Fill a block with a row, or with drawn words."""
        block = self._memory.blocks[index]
        block.copy_(words)
        self._found.moved_bytes += block.nbytes + (block.nbytes if words.dim() > 1 else 0)

    def plant(self) -> None:
        """Invert the lowest bit of the byte to be flipped, once in each kind: the fault that shows that errors show."""
        offset_bytes, self._unplanted = self._unplanted, None
        if offset_bytes is None:
            return
        for block in self._memory.blocks:
            if offset_bytes < block.nbytes:
                block.view(-1)[offset_bytes // 8] ^= 1 << (offset_bytes % 8 * 8)
                return
            offset_bytes -= block.nbytes

    def check(self, index: int, words: torch.Tensor, step: str) -> None:
        """Compare a block with a row, or with drawn words; keep what differs."""
        block = self._memory.blocks[index]
        wrong = self._memory.wrong[: len(block)]
        torch.ne(block, words, out=wrong)
        self._found.moved_bytes += int(CHECK_TRAFFIC * block.nbytes) + (block.nbytes if words.dim() > 1 else 0)
        if wrong.any():
            self._keep(index, words.expand_as(block), step)

    def _keep(self, index: int, words: torch.Tensor, step: str) -> None:
        for start in range(0, len(words), SLICE_ROWS):
            wrong = self._memory.wrong[start : min(start + SLICE_ROWS, len(words))]
            count = int(wrong.sum())
            self._found.errors_by_kind[self._kind] += count
            wanted = FIRST_ERRORS - len(self._found.first_errors)
            if count and wanted:
                for row, column in wrong.nonzero()[:wanted].tolist():
                    self._found.first_errors.append(self._error(index, (start + row, column), words, step))

    def _error(self, index: int, place: tuple[int, int], words: torch.Tensor, step: str) -> PatternError:
        block = self._memory.blocks[index]
        offset_bytes = 8 * (place[0] * ROW + place[1])
        expected, found = (int(values[place].item()) % 2**64 for values in (words, block))
        return PatternError(
            kind=self._kind,
            step=step,
            block=index,
            offset_bytes=offset_bytes,
            device_pointer=f"{block.data_ptr() + offset_bytes:#x}",
            expected=f"{expected:#018x}",
            found=f"{found:#018x}",
            wrong_bits=[bit for bit in range(64) if (expected ^ found) >> bit & 1],
        )


def _moving_inversions(search: _Search) -> None:
    for pattern in INVERTED:
        name = f"{pattern:#018x}"
        search.say(name)
        words, complement = search.row([pattern] * ROW), search.row([pattern ^ (2**64 - 1)] * ROW)
        for index in search.up:
            search.write(index, words)
        search.plant()
        for index in search.up:
            search.check(index, words, f"{name} up")
            search.write(index, complement)
        for index in search.down:
            search.check(index, complement, f"{name} down")
            search.write(index, words)
        for index in search.up:
            search.check(index, words, f"{name} last")


def _walking_bits(search: _Search) -> None:
    for name, background in (("one", 0), ("zero", 2**64 - 1)):
        for step in range(ROW):
            search.say(f"{name}, step {step + 1} of {ROW}")
            words = search.row([(1 << (column + step) % ROW) ^ background for column in range(ROW)])
            for index in search.up:
                search.write(index, words)
            search.plant()
            for index in search.up:
                search.check(index, words, f"{name}, step {step + 1}")


def _random(search: _Search) -> None:
    for name, inverted in (("drawn", False), ("complement", True)):
        search.say(name)
        for index in search.up:
            search.write(index, search.draw(index, inverted=inverted))
        search.plant()
        for index in search.up:
            search.check(index, search.draw(index, inverted=inverted), name)


KINDS: Mapping[str, Callable[[_Search], None]] = {
    "moving inversions": _moving_inversions,
    "walking bits": _walking_bits,
    "random": _random,
}
SWEEPS: Mapping[str, float] = {
    "moving inversions": len(INVERTED) * 3 * (1 + CHECK_TRAFFIC),
    "walking bits": 2 * ROW * (1 + CHECK_TRAFFIC),
    "random": (1 + 2) + (1 + 1 + CHECK_TRAFFIC) + (3 + 2) + (3 + 1 + CHECK_TRAFFIC),
}
"""Bytes moved by each kind for one byte tested; drawing a word writes it, inverting it reads and writes it."""


def _simulated(call: Simulated) -> PatternResult:
    """Patterns over nearly all of the memory."""
    bad = call.has("pattern")
    total = int(call.spec.memory_gib * GIB)
    free = int(0.995 * total)
    tested = int(call.kwargs.get("share", 0.95) * free)
    first = PatternError(
        kind="random",
        step="read",
        block=17,
        offset_bytes=4096,
        device_pointer="0x7f0000001000",
        expected="0x00000000ffffffff",
        found="0x00000000fffffffb",
        wrong_bits=[2],
    )
    return PatternResult(
        errors=3 if bad else 0,
        errors_by_kind={"random": 3} if bad else {},
        first_errors=[first] if bad else [],
        tested_bytes=tested, free_bytes=free, total_bytes=total, share_of_free=tested / free, share_of_total=tested / total,
        seconds=16.0, expected_s=15.0, moved_bytes=28 * tested, tb_s=3.6, device=call.device,
        telemetry=call.telemetry(),
    )  # fmt: skip


@simulated_by(_simulated)
def hbm_pattern(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    *,
    share: float = 0.9,
    passes: int = 1,
    first_pass: int = 0,
    chunk_bytes: int = GIB,
    reserve_bytes: int = GIB,
    kinds: Sequence[str] = tuple(KINDS),
    limit_bytes: int | None = None,
    flip: int | None = None,
) -> PatternResult:
    """Write patterns over the free memory of the current device and read them back; wrong bits are the result.

    One pass of all kinds moves each tested byte about 350 times: some 12 s for the 126 GB of an H200 at 4 TB/s.

    Args:
        share: part of the free memory to test, above 0, at most 1.
        passes: how often all of it is done; random words differ from pass to pass.
        first_pass: number of the first pass, so that a soak's calls draw other words each time.
        chunk_bytes: size of one block, a multiple of 512. One and an eighth more of it is held to compare in.
        reserve_bytes: what stays free besides, for the search of errors and for the driver.
        kinds: some of :data:`KINDS`, in the order to run.
        limit_bytes: the most that is tested; None: the whole share, on a CPU 64 MiB.
        flip: the fault that shows that the test sees one: invert the lowest bit of the byte at this offset in the tested
            memory, once in each kind of each pass, after its first write.

    Raises:
        ValueError: an unknown kind, with the valid ones, or a number out of its range.
        MemoryError: less than the share is free; names the sizes and the command that shows the processes that hold the rest.
        RuntimeError: CUDA's own, for an uncorrectable error that ECC saw.
    """
    _require_sense(share, passes, chunk_bytes, kinds, (reserve_bytes, limit_bytes))
    torch.cuda.empty_cache()  # what this process merely keeps for later counts as free
    room = _find_room(share, chunk_bytes, reserve_bytes, limit_bytes)
    if flip is not None and not 0 <= flip < room.tested_bytes:
        raise ValueError(f"flip must lie in the {room.tested_bytes} bytes that are tested, not at {flip}")
    expected_s = _traffic_bytes(room, passes, kinds) / GUESS_TB_S / 1e12
    progress.report(f"{room.tested_bytes / 1e9:.1f} GB, about {expected_s:.0f} s at {GUESS_TB_S:g} TB/s", 0.0)
    try:
        with Sampler(timing.gpu_uuid()) as sampler:
            found, seconds = _run(room, range(first_pass, first_pass + passes), kinds, flip)
    finally:
        torch.cuda.empty_cache()  # the next measurement asks the driver what is free
    progress.report("done", 1.0)
    return PatternResult(
        errors=sum(found.errors_by_kind.values()),
        errors_by_kind=found.errors_by_kind,
        first_errors=found.first_errors,
        tested_bytes=room.tested_bytes,
        free_bytes=room.free_bytes,
        total_bytes=room.total_bytes,
        share_of_free=room.tested_bytes / room.free_bytes,
        share_of_total=room.tested_bytes / room.total_bytes,
        seconds=seconds,
        expected_s=expected_s,
        moved_bytes=found.moved_bytes,
        tb_s=found.moved_bytes / seconds / 1e12,
        device=timing.device_name(),
        telemetry=sampler.summary(),
    )


def _require_sense(
    share: float, passes: int, chunk_bytes: int, kinds: Sequence[str], bytes_given: tuple[int, int | None]
) -> None:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        what = f"unknown kind {unknown[0]!r}" if unknown else "no kind"
        raise ValueError(f"{what}; valid: {', '.join(KINDS)}")
    reserve_bytes, limit_bytes = bytes_given
    if not 0 < share <= 1 or passes < 1 or reserve_bytes < 0:
        raise ValueError(f"0 < share <= 1, passes >= 1, reserve_bytes >= 0: not {share}, {passes}, {reserve_bytes}")
    if chunk_bytes < ROW_BYTES or chunk_bytes % ROW_BYTES or (limit_bytes is not None and limit_bytes < ROW_BYTES):
        raise ValueError(
            f"chunk_bytes is a multiple of {ROW_BYTES}, limit_bytes at least that: not {chunk_bytes}, {limit_bytes}"
        )


def _find_room(share: float, chunk_bytes: int, reserve_bytes: int, limit_bytes: int | None) -> _Room:
    """How much to test.

    Raises:
        MemoryError: the share, what it is compared in and the reserve are more than what is free.
    """
    free_bytes, total_bytes = hbm.free_and_total_bytes()
    if limit_bytes is None and not torch.cuda.is_available():
        limit_bytes = CPU_LIMIT_BYTES
    tested_bytes = math.ceil(share * free_bytes / ROW_BYTES) * ROW_BYTES
    if limit_bytes is not None:
        tested_bytes = min(tested_bytes, limit_bytes // ROW_BYTES * ROW_BYTES)
    block_bytes = min(chunk_bytes, tested_bytes)
    room = _Room(tested_bytes, block_bytes, free_bytes, total_bytes)
    if not 0 < tested_bytes + block_bytes * 9 // 8 + reserve_bytes <= free_bytes:
        beside = f"{(block_bytes * 9 // 8 + reserve_bytes) / GIB:.2f} GiB beside it to compare in and to leave free"
        raise timing.memory_error(_too_little(f"{tested_bytes / GIB:.2f} GiB are to be tested, with {beside}", room))
    return room


def _too_little(what: str, room: _Room) -> str:
    """The message: why there is too little memory, and how to find the processes that hold it."""
    own, look = "", "ps aux --sort=-rss"
    if torch.cuda.is_available():
        own = f" ({torch.cuda.memory_allocated() / GIB:.2f} GiB by tensors of this very process)"
        look = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
    return (
        f"{what}; {room.free_bytes / GIB:.2f} of {room.total_bytes / GIB:.2f} GiB were free on {timing.device_name()}, "
        f"{(room.total_bytes - room.free_bytes) / GIB:.2f} GiB in use{own}. Who holds them: {look} (on the host: a "
        "container does not see processes outside it)"
    )


def _traffic_bytes(room: _Room, passes: int, kinds: Sequence[str]) -> int:
    return int(passes * sum(SWEEPS[kind] for kind in kinds) * room.tested_bytes)


def _run(room: _Room, passes: range, kinds: Sequence[str], flip: int | None) -> tuple[_Errors, float]:
    """What was found, and in how many seconds; the memory is free again on return."""
    found = _Errors()
    memory = _allocate(room)
    search = _Search(memory, found, flip=flip, expected_bytes=_traffic_bytes(room, len(passes), kinds))
    timing.synchronize()
    start_s = time.perf_counter()
    for test in passes:
        for kind in kinds:
            search.begin(kind, test=test)
            KINDS[kind](search)
    timing.synchronize()
    return found, time.perf_counter() - start_s


def _allocate(room: _Room) -> _Memory:
    """The memory to compare in first, then the blocks.

    Raises:
        MemoryError: another process took the memory meanwhile.
    """
    device = timing.current_device()
    blocks: list[torch.Tensor] = []
    try:
        drawn = torch.empty((room.block_bytes // ROW_BYTES, ROW), dtype=torch.int64, device=device)
        wrong = torch.empty(drawn.shape, dtype=torch.bool, device=device)
        for start in range(0, room.tested_bytes, room.block_bytes):
            rows = min(room.block_bytes, room.tested_bytes - start) // ROW_BYTES
            blocks.append(torch.empty((rows, ROW), dtype=torch.int64, device=device))
    except torch.cuda.OutOfMemoryError as error:
        got_bytes = sum(block.nbytes for block in blocks)
        blocks.clear()  # the error's traceback keeps this frame alive
        what = f"only {got_bytes / GIB:.2f} of the {room.tested_bytes / GIB:.2f} GiB to be tested could be had"
        raise timing.memory_error(_too_little(what, room)) from error
    return _Memory(blocks, drawn, wrong)

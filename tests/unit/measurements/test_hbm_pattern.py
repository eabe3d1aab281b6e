"""The memory pattern test on a CPU: it finds what is planted, says where, and says how much it looked at."""

from __future__ import annotations

import dataclasses
import json
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpucluster.measurements import hbm, hbm_pattern, progress, timing
from pytest_gpucluster.protocol import plain_data

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS_PER_BLOCK = 256
SMALL = {"limit_bytes": 5 * 1024, "chunk_bytes": 8 * WORDS_PER_BLOCK, "reserve_bytes": 0}
"""Three blocks of 256, 256 and 128 words."""
H200_FREE_BYTES, H200_TOTAL_BYTES = 149_000_000_000, 150_754_820_096


def small(**changes: Any) -> hbm_pattern.PatternResult:
    """A test of 5 KiB in three blocks."""
    return hbm_pattern.hbm_pattern(**{**SMALL, **changes})


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Say how much memory is free, and how much there is."""

    def say(free_bytes: int, total_bytes: int) -> None:
        monkeypatch.setattr(hbm, "free_and_total_bytes", lambda: (free_bytes, total_bytes))

    return say


# --- a healthy memory ---


def test_healthy_memory_has_no_error(free_memory: Callable[[int, int], None]) -> None:
    """No error in any kind, an honest coverage, and plain data that crosses a process."""
    free_memory(20_480, 40_960)
    found = small()
    assert (found.errors, found.first_errors) == (0, [])
    assert found.errors_by_kind == {"moving inversions": 0, "walking bits": 0, "random": 0}
    assert found.tested_bytes == 5120
    assert (found.share_of_free, found.share_of_total) == (0.25, 0.125)
    assert found.tb_s == pytest.approx(found.moved_bytes / found.seconds / 1e12)
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert plain_data.from_plain(plain_data.to_plain(found)) == found


@pytest.mark.parametrize("kind", hbm_pattern.KINDS)
def test_traffic_is_what_the_estimate_says(kind: str) -> None:
    """Bytes moved are counted where they are moved, and equal the table that the estimate is made from."""
    found = small(kinds=[kind], passes=2)
    assert found.moved_bytes == 2 * hbm_pattern.SWEEPS[kind] * found.tested_bytes
    assert found.expected_s == pytest.approx(found.moved_bytes / 4e12)
    assert list(found.errors_by_kind) == [kind]


def test_one_pass_of_an_h200_takes_less_than_half_a_minute(free_memory: Callable[[int, int], None]) -> None:
    """All kinds over 95 % of what is free, at 4 TB/s."""
    free_memory(H200_FREE_BYTES, H200_TOTAL_BYTES)
    room = hbm_pattern._find_room(0.95, hbm_pattern.GIB, hbm_pattern.GIB, limit_bytes=1 << 40)
    assert room.tested_bytes >= 0.95 * H200_FREE_BYTES
    assert 10 < hbm_pattern._traffic_bytes(room, 1, list(hbm_pattern.KINDS)) / 4e12 < 15


def test_progress_goes_from_nothing_to_all() -> None:
    """The first report names the estimate; fractions never go back and end at 1."""
    heard: list[tuple[str, float | None]] = []
    progress.listen(lambda step, fraction: heard.append((step, fraction)))
    try:
        small()
    finally:
        progress.listen(lambda _step, _fraction: None)
    assert heard[0] == ("0.0 GB, about 0 s at 4 TB/s", 0.0)
    assert heard[-1] == ("done", 1.0)
    fractions = [fraction for _step, fraction in heard]
    assert fractions == sorted(fractions)
    assert "walking bits: zero, step 64 of 64" in [step for step, _fraction in heard]


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the result keeps a block alive, errors included."""
    blocks: list[weakref.ref[torch.Tensor]] = []
    allocate = hbm_pattern._allocate

    def watched(room: Any) -> Any:
        memory = allocate(room)
        blocks.extend(weakref.ref(block) for block in memory.blocks)
        return memory

    monkeypatch.setattr(hbm_pattern, "_allocate", watched)
    found = small(flip=0)
    assert found.errors == 3
    assert [block() for block in blocks] == [None] * 3


def test_every_pass_and_block_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pattern in two places would hide an address that is decoded wrong."""
    drawn: dict[int, set[int]] = {}
    draw = hbm_pattern._Search.draw

    def spy(search: Any, index: int, *, inverted: bool) -> torch.Tensor:
        words = draw(search, index, inverted=inverted)
        drawn.setdefault(len(drawn), set()).update(words.flatten().tolist())
        return words

    monkeypatch.setattr(hbm_pattern._Search, "draw", spy)
    small(kinds=["random"], passes=2)
    calls = 2 * 2 * 2 * 3  # passes, drawn and complement, written and compared, blocks
    assert len(drawn) == calls
    assert len(set.union(*drawn.values())) == 2 * 2 * 640
    assert any(word < 0 for word in drawn[0])  # the highest bit is drawn, too


# --- errors ---


def test_a_later_call_draws_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak numbers its rounds; the same number draws the same words."""
    drawn: list[list[int]] = []
    draw = hbm_pattern._Search.draw

    def spy(search: Any, index: int, *, inverted: bool) -> torch.Tensor:
        words = draw(search, index, inverted=inverted)
        drawn.append(words.flatten().tolist())
        return words

    monkeypatch.setattr(hbm_pattern._Search, "draw", spy)
    for number in (1, 1, 2):
        small(kinds=["random"], first_pass=number)
    share = len(drawn) // 3
    first, again, other = drawn[:share], drawn[share : 2 * share], drawn[2 * share :]
    assert first == again
    assert not {word for words in first for word in words} & {word for words in other for word in words}


@pytest.mark.parametrize("kind", hbm_pattern.KINDS)
@pytest.mark.parametrize(
    ("flip", "block", "offset_bytes", "bit"), [(0, 0, 0, 0), (2048 + 8 * 65 + 7, 1, 8 * 65, 56), (5119, 2, 1016, 56)]
)
def test_one_flipped_bit_is_found_and_placed(kind: str, flip: int, block: int, offset_bytes: int, bit: int) -> None:
    """First, middle or last byte: exactly one error, in the right block, word and bit."""
    found = small(kinds=[kind], flip=flip)
    assert (found.errors, found.errors_by_kind) == (1, {kind: 1})
    (error,) = found.first_errors
    assert (error.kind, error.block, error.offset_bytes, error.wrong_bits) == (kind, block, offset_bytes, [bit])
    assert int(error.expected, 16) ^ int(error.found, 16) == 1 << bit
    assert len(error.expected) == len(error.found) == 18


def test_a_flip_is_planted_in_each_kind_of_each_pass() -> None:
    """The self-test of a long run shows that its last pass still sees errors."""
    found = small(flip=3000, passes=2)
    assert found.errors_by_kind == {"moving inversions": 2, "walking bits": 2, "random": 2}
    assert found.errors == 6


def test_device_pointer_is_that_of_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer is the block's plus the offset; the text holds all of it."""
    pointers: list[int] = []
    allocate = hbm_pattern._allocate

    def watched(room: Any) -> Any:
        memory = allocate(room)
        pointers.extend(block.data_ptr() for block in memory.blocks)
        return memory

    monkeypatch.setattr(hbm_pattern, "_allocate", watched)
    (error,) = small(kinds=["moving inversions"], flip=2048 + 24).first_errors
    assert error.device_pointer == f"{pointers[1] + 24:#x}"
    assert error.text == (
        f"moving inversions, 0x0000000000000000 up: block 1 + 24 bytes ({pointers[1] + 24:#x}): "
        "expected 0x0000000000000000, found 0x0000000000000001, wrong bits: 0"
    )


def stick(monkeypatch: pytest.MonkeyPatch, harm: Callable[[int, int, torch.Tensor], None]) -> None:
    """Let ``harm(number of the write, index, block)`` spoil each block after it was written."""
    write = hbm_pattern._Search.write
    writes: list[int] = []

    def spoilt(search: Any, index: int, words: torch.Tensor) -> None:
        write(search, index, words)
        writes.append(index)
        harm(len(writes), index, search._memory.blocks[index])

    monkeypatch.setattr(hbm_pattern._Search, "write", spoilt)


def test_stuck_bit_is_counted_in_every_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 5 of one word is always 1: counts by kind are those of the patterns that want 0 there; 16 are listed."""

    def stuck(_number: int, index: int, block: torch.Tensor) -> None:
        if index == 1:
            block[2, 7] |= 1 << 5

    stick(monkeypatch, stuck)
    found = small()
    wanting_zero = sum(1 for pattern in hbm_pattern.INVERTED if not pattern >> 5 & 1)
    inversions = 2 * wanting_zero + (len(hbm_pattern.INVERTED) - wanting_zero)
    assert found.errors_by_kind == {"moving inversions": inversions, "walking bits": 63 + 1, "random": 1}
    assert found.errors == inversions + 65
    assert len(found.first_errors) == 16
    assert {(error.block, error.offset_bytes, *error.wrong_bits) for error in found.first_errors} == {(1, 8 * (2 * 64 + 7), 5)}


@pytest.mark.parametrize(("number", "step"), [(1, "up"), (4, "down"), (7, "last")])
def test_every_comparison_of_moving_inversions_sees_its_own_write(
    monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    """A write that goes wrong is seen by the comparison that follows it, and by no other."""

    def once(done: int, _index: int, block: torch.Tensor) -> None:
        if done == number:
            block[0, 3] ^= -(2**63)

    stick(monkeypatch, once)
    found = small(kinds=["moving inversions"])
    (error,) = found.first_errors
    assert (found.errors, error.step, error.wrong_bits) == (1, f"0x0000000000000000 {step}", [63])


@pytest.mark.parametrize("column", [0, 17, 63])
def test_a_short_between_two_bits_is_seen_by_walking_bits(monkeypatch: pytest.MonkeyPatch, column: int) -> None:
    """Bit 40 follows bit 41: each walk passes both, and no word is left out."""

    def short(_number: int, index: int, block: torch.Tensor) -> None:
        if index == 0:
            word = int(block[1, column].item())
            block[1, column] = word & ~(1 << 40) | (word >> 41 & 1) << 40

    stick(monkeypatch, short)
    found = small(kinds=["walking bits"])
    assert found.errors == 4  # a one and a zero, on either of the two
    assert {tuple(error.wrong_bits) for error in found.first_errors} == {(40,)}
    assert {error.offset_bytes for error in found.first_errors} == {8 * (64 + column)}


def test_block_that_cannot_be_written_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words wrong: all counted, 16 listed, nothing raised; the search in slices misses and doubles none."""
    monkeypatch.setattr(hbm_pattern, "SLICE_ROWS", 3)

    def dead(_number: int, index: int, block: torch.Tensor) -> None:
        if index == 0:
            block.fill_(0x1234567890ABCDEF)

    stick(monkeypatch, dead)
    found = small(kinds=["moving inversions"])
    assert found.errors == len(hbm_pattern.INVERTED) * 3 * WORDS_PER_BLOCK
    assert [error.offset_bytes for error in found.first_errors] == [8 * word for word in range(16)]


def test_error_in_a_later_slice_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets count from the block's start, not from the slice's."""
    monkeypatch.setattr(hbm_pattern, "SLICE_ROWS", 1)
    (error,) = small(kinds=["random"], flip=2048 + 1536).first_errors
    assert (error.block, error.offset_bytes) == (1, 1536)


def test_two_addresses_of_one_cell_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 0 and 1 are the same memory: each word alone is sound, yet inversions and random words show it."""
    allocate = hbm_pattern._allocate

    def aliased(room: Any) -> Any:
        memory = allocate(room)
        memory.blocks[1] = memory.blocks[0]
        return memory

    monkeypatch.setattr(hbm_pattern, "_allocate", aliased)
    found = small()
    assert found.errors_by_kind["moving inversions"] >= WORDS_PER_BLOCK
    assert found.errors_by_kind["random"] == 2 * WORDS_PER_BLOCK


def test_word_that_reads_right_the_second_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong reading counts as an error, and differs in the result from a wrong word."""
    right, calls = torch.ne, []

    def wrong_once(block: torch.Tensor, words: torch.Tensor, *, out: torch.Tensor) -> None:
        right(block, words, out=out)
        calls.append(1)
        if len(calls) == 1:
            out[0, 5] = True

    monkeypatch.setattr(torch, "ne", wrong_once)
    found = small(kinds=["random"])
    (error,) = found.first_errors
    assert (found.errors, error.offset_bytes, error.wrong_bits) == (1, 40, [])
    assert error.found == error.expected
    assert error.text.endswith("wrong bits: none when read again")


# --- too little memory ---


def test_share_that_cannot_be_had_is_refused(free_memory: Callable[[int, int], None]) -> None:
    """Another process holds most of the memory: the error says how much is free and held, and how to find the process."""
    free_memory(10 << 30, 140 << 30)
    with pytest.raises(MemoryError) as caught:
        hbm_pattern.hbm_pattern(limit_bytes=1 << 40)
    assert str(caught.value) == (
        "9.00 GiB are to be tested, with 2.12 GiB beside it to compare in and to leave free; 10.00 of 140.00 GiB were "
        "free on cpu, 130.00 GiB in use. Who holds them: ps aux --sort=-rss (on the host: a container does not see "
        "processes outside it)"
    )


def test_no_free_memory_at_all_is_refused(free_memory: Callable[[int, int], None]) -> None:
    """Nothing to test is no test that passed."""
    free_memory(0, 1 << 30)
    with pytest.raises(MemoryError, match=r"0\.00 of 1\.00 GiB were free"):
        small()


def test_memory_that_is_gone_when_it_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process was faster: the same error, with what could be had."""
    right, calls = torch.empty, []

    def short(*shape: Any, **keywords: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:  # after two to compare in and one block
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return right(*shape, **keywords)

    monkeypatch.setattr(torch, "empty", short)
    with pytest.raises(MemoryError, match=r"only 1\.00 of the 3\.00 GiB to be tested could be had; .* were free on"):
        hbm_pattern._allocate(hbm_pattern._Room(3 << 30, 1 << 30, 4 << 30, 8 << 30))


def test_on_a_gpu_the_driver_s_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU: what of it this process holds itself, and nvidia-smi for the rest."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(timing, "device_name", lambda: "NVIDIA H200")
    text = hbm_pattern._too_little("too little", hbm_pattern._Room(1, 1, 10 << 30, 140 << 30))
    assert "130.00 GiB in use (3.00 GiB by tensors of this very process)" in text
    assert "nvidia-smi --query-compute-apps=pid,name,used_memory" in text


def test_a_cpu_is_tested_in_part_only() -> None:
    """Without a limit, 64 MiB of a machine's memory; the share says how little that is."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which is tested whole")
    room = hbm_pattern._find_room(0.9, 1 << 20, 0, None)
    assert room.tested_bytes == 64 << 20


# --- wrong use ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kinds": ["moving inversions", "zeros"]}, "unknown kind 'zeros'; valid: moving inversions, walking bits, random"),
        ({"kinds": []}, "no kind; valid: moving inversions"),
        ({"share": 0}, "0 < share <= 1"),
        ({"share": 1.1}, "0 < share <= 1"),
        ({"passes": 0}, "passes >= 1"),
        ({"reserve_bytes": -1}, "reserve_bytes >= 0"),
        ({"chunk_bytes": 1000}, "a multiple of 512"),
        ({"chunk_bytes": 0}, "a multiple of 512"),
        ({"limit_bytes": 511}, "limit_bytes at least that"),
        ({"flip": 5120}, "flip must lie in the 5120 bytes that are tested, not at 5120"),
        ({"flip": -1}, "flip must lie"),
    ],
)
def test_refuses(changes: dict[str, Any], text: str) -> None:
    """Arguments that test nothing, or something else than meant, are an error before any memory is allocated."""
    with pytest.raises(ValueError, match=text):
        small(**changes)

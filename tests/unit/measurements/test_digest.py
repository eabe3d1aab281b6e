"""Digests of seeded work: every flipped bit is found, a device in order raises no alarm, and the right one is named.

The same tests run on a GPU where there is one, with larger matrices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpucluster.judging.agreement import suspicions
from pytest_gpucluster.measurements import digest, progress, timing
from pytest_gpucluster.protocol.plain_data import from_plain, to_plain
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 2048 if torch.cuda.is_available() else 32
WORD = 2**64
BITS = {
    "bf16": 16 * SIZE * SIZE,
    "fp8": 16 * SIZE * SIZE,
    "fp32": 32 * SIZE * SIZE,
    "attention": 16 * SIZE * digest.HEADS * digest.HEAD_SIZE,
    "softmax": 32 * SIZE * SIZE,
    "reduction": 32 * (2 * SIZE + 1),
}
"""Bits of each kind's output."""


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of a tensor, made on its device as that of an output is."""
    content = digest._bytes(tensor)
    return digest._text(digest.fingerprint(content, digest.weights(tensor.device)).cpu(), content.numel())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of OpenMP that wait for each other on a busy machine make these tests four times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def repeatable_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the workers' variable; torch refuses products on a GPU without it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def small(**changes: Any) -> digest.Digests:
    """Few rounds of small work."""
    recipe: dict[str, Any] = {"rounds": 2, "size": SIZE, "seed": 7}
    return digest.digests(**{**recipe, **changes})


# --- inputs and weights: integer arithmetic, written out a second time in Python's own integers ---


def splitmix(key: int, count: int) -> list[int]:
    """SplitMix64, as published."""
    words = []
    for index in range(1, count + 1):
        word = (key + index * 0x9E3779B97F4A7C15) % WORD
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
        words.append(word ^ word >> 31)
    return words


def test_random_words_are_the_published_ones() -> None:
    """The first outputs of SplitMix64 for the state 1234567, and our own second writing of it."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix(1234567, 5) == published
    made = digest._random_words(1000, key=1234567, device=timing.current_device())
    assert [word % WORD for word in made.tolist()] == splitmix(1234567, 1000)


@pytest.mark.parametrize("key", [0, 1, WORD // 2, WORD - 1])
def test_inputs_follow_from_the_words_exactly(key: int) -> None:
    """The sum of three fields of 21 bits, brought to mean 0 and variance 1: no rounding, so no choice."""
    made = digest.normal(8, 16, key=key, device=timing.current_device())
    assert (made.shape, made.dtype) == ((8, 16), torch.float32)
    sums = [sum(word >> by & 0x1FFFFF for by in (0, 21, 42)) for word in splitmix(key, 128)]
    assert made.flatten().tolist() == [(one - 3 * 2**20) / 2**20 for one in sums]


def test_inputs_are_like_normal_numbers() -> None:
    """Mean 0, variance 1, within 3 of it, and not the same for another key: real work draws real power."""
    made = digest.normal(512, 512, key=3, device=timing.current_device()).double()
    assert abs(made.mean().item()) < 0.01
    assert abs(made.var().item() - 1) < 0.02
    assert 2.5 < made.abs().max().item() <= 3
    assert not torch.equal(made, digest.normal(512, 512, key=4, device=timing.current_device()))


def test_inputs_never_change() -> None:
    """Their digest is pinned: other bits on another device, driver, torch or release would be seen here."""
    made = digest.normal(64, 64, key=1, device=timing.current_device())
    assert digest_of(made) == "84f8203a465b92d0cd28ec12d99d255ff7d88a4394bf1551"


# --- the digest itself ---


def reference_digest(content: bytes, block: int) -> str:
    """The digest by Python's own integers."""
    weights = [word | 1 for word in splitmix(digest._key("weights"), 2 * block)]
    filled = content + bytes(-len(content) % 4)
    words = [int.from_bytes(filled[at : at + 4], "little", signed=True) for at in range(0, len(filled), 4)]
    blocks = [words[at : at + block] for at in range(0, len(words), block)]
    first, second = (
        [sum(x * w for x, w in zip(part, row, strict=False)) % WORD for part in blocks]
        for row in (weights[:block], weights[block:])
    )
    packed = b"".join(one.to_bytes(8, "little") for one in [*first, *second])
    rest = hashlib.blake2b(packed + len(content).to_bytes(8, "little"), digest_size=16).hexdigest()
    return f"{sum(first) % WORD:016x}{rest}"


def of_bytes(content: bytes) -> str:
    """The digest of bytes, made on the device."""
    return digest_of(torch.tensor(list(content), dtype=torch.uint8, device=timing.current_device()))


def flipped(content: bytes, *bits: int) -> bytes:
    """A copy with these bits the other way round."""
    copy = bytearray(content)
    for bit in bits:
        copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 16 words, so that little content has many."""
    monkeypatch.setattr(digest, "BLOCK", 16)
    return 16


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 1001])
def test_digest_is_what_it_says(length: int, short_blocks: int) -> None:
    """Odd lengths, whole blocks, and a word more or less."""
    content = random.Random(length).randbytes(length)
    assert of_bytes(content) == reference_digest(content, short_blocks)


@pytest.mark.parametrize("length", [1, 3, 7, 63, 65, 131])
def test_every_single_bit_counts(length: int, short_blocks: int) -> None:
    """All of them, one at a time; the part that promises certainty, the first 16 digits, changes alone already."""
    content = random.Random(length).randbytes(length)
    own = of_bytes(content)
    found = [of_bytes(flipped(content, bit)) for bit in range(8 * length)]
    assert own not in found
    assert own[:16] not in {one[:16] for one in found}
    assert len(set(found)) == len(found)


def test_random_bits_of_long_content_count() -> None:
    """More than a block at its real length, an odd number of bytes, 200 bits by chance."""
    chance = random.Random(11)
    content = torch.tensor(list(chance.randbytes(4 * digest.BLOCK + 12_345)), dtype=torch.uint8, device=timing.current_device())
    weights = digest.weights(content.device)
    own = digest.fingerprint(content, weights)
    assert own.shape == (2, 2)
    for _ in range(200):
        bit = chance.randrange(8 * content.numel())
        digest._flip(content, bit)
        assert not torch.equal(digest.fingerprint(content, weights), own), bit
        digest._flip(content, bit)
    assert torch.equal(digest.fingerprint(content, weights), own)


def test_top_bits_do_not_cancel(short_blocks: int) -> None:
    """Any two top bits of 32-bit or of 64-bit words: a sum over 64-bit words would not see one of the latter."""
    content = random.Random(5).randbytes(160)
    tops = range(31, 8 * len(content), 32)
    pairs = [(one, other) for one in tops for other in tops if one < other]
    found = {of_bytes(flipped(content, *pair)) for pair in pairs}
    assert of_bytes(content) not in found
    assert len(found) == len(pairs)


def test_order_and_length_count() -> None:
    """Words or bytes that changed places, zeros that came or went, a stuck bit everywhere."""
    content = random.Random(6).randbytes(400)
    others = [
        content[4:8] + content[:4] + content[8:],
        content[1:2] + content[:1] + content[2:],
        content[200:] + content[:200],
        content + b"\0",
        content + bytes(8),
        content[:-1],
        bytes(byte | 1 for byte in content),
        bytes(byte ^ 0x80 for byte in content),
        bytes(len(content)),
        bytes(len(content) + 1),
    ]
    assert len({of_bytes(one) for one in [content, *others]}) == 1 + len(others)


def test_digest_sees_bits_and_not_numbers() -> None:
    """0.0 and -0.0 are equal and differ; two NaN with the same bits do not."""
    device = timing.current_device()
    assert digest_of(torch.zeros(3, device=device)) != digest_of(-torch.zeros(3, device=device))
    assert digest_of(torch.full((3,), torch.nan, device=device)) == digest_of(torch.full((3,), torch.nan, device=device))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_any_dtype_and_layout_has_a_digest(dtype: torch.dtype) -> None:
    """By its elements in order, wherever they lie in memory."""
    matrix = torch.arange(15, device=timing.current_device()).view(3, 5).to(dtype)
    assert digest_of(matrix.t().contiguous().t()) == digest_of(matrix)
    assert digest_of(matrix.t()) != digest_of(matrix)


# --- rounds ---


def test_hundred_clean_rounds_raise_no_alarm() -> None:
    """No kind differs in any round, cold or hot, and all was done."""
    found = small(rounds=50, heat_s=0.05)
    assert found.differing == dict.fromkeys(digest.KINDS, 0)
    assert (found.differing_rounds, found.unsteady) == ({}, {})
    assert (found.rounds, found.hot_rounds) == (100, 50)
    assert len(set(found.digests.values())) == len(digest.KINDS)


@pytest.mark.parametrize("kind", digest.KINDS)
def test_200_flips_are_200_found(kind: str) -> None:
    """One random bit of the output in each of 200 rounds: every one is seen, in its round and under its kind."""
    chance = random.Random(kind)
    flips = [{"kind": kind, "round": index, "bit": chance.randrange(BITS[kind])} for index in range(1, 201)]
    found = small(rounds=201, kinds=[kind], flips=flips)
    assert found.differing == {kind: 200}
    assert found.unsteady == {kind: "200 of 201 rounds are not like the first: 1, 2, 3, 4, 5, .."}
    assert found.differing_rounds == {kind: list(range(1, digest.ROUNDS_LISTED + 1))}
    assert found.digests == small(kinds=[kind]).digests


@pytest.mark.parametrize("kind", digest.KINDS)
def test_last_bit_is_there_and_the_next_is_not(kind: str) -> None:
    """So the 200 above were drawn from the whole output."""
    last = BITS[kind] - 1
    assert small(kinds=[kind], flips=[{"kind": kind, "bit": last, "round": 1}]).differing == {kind: 1}
    with pytest.raises(ValueError, match=f"no bit {last + 1} in {BITS[kind] // 8} bytes"):
        small(kinds=[kind], flips=[{"kind": kind, "bit": last + 1}])


def test_flip_in_one_kind_leaves_the_others() -> None:
    """And is seen among them; only in the round in which it struck."""
    found = small(rounds=5, flips=[{"kind": "softmax", "bit": 3, "round": 2}])
    assert found.differing == {kind: int(kind == "softmax") for kind in digest.KINDS}
    assert found.differing_rounds == {"softmax": [2]}
    assert found.unsteady == {"softmax": "1 of 5 rounds are not like the first: 2"}


def test_fault_that_comes_with_heat_is_seen_alone() -> None:
    """Cold rounds are the measure of the hot ones, so one device is enough."""
    found = small(rounds=3, heat_s=0.01, kinds=["bf16"], flips=[{"kind": "bf16", "bit": 9, "round": 4}])
    assert (found.rounds, found.hot_rounds) == (6, 3)
    assert found.differing_rounds == {"bf16": [4]}


def test_seed_size_and_nothing_else_decides() -> None:
    """Another seed gives other results; other company, other rounds and heat do not."""
    alone = small(kinds=["fp32"], rounds=1)
    assert alone.digests["fp32"] == small(heat_s=0.01).digests["fp32"]
    assert alone.digests != small(kinds=["fp32"], seed=8).digests
    assert alone.digests != small(kinds=["fp32"], size=SIZE + 16).digests


def test_time_prolongs_the_rounds() -> None:
    """Never fewer than asked, and as many more as there is time for."""
    found = small(rounds=2, kinds=["reduction"], seconds=0.5)
    assert found.seconds >= 0.5
    assert found.rounds > 2
    assert (found.hot_rounds, found.differing) == (0, {"reduction": 0})


def test_stale_memory_does_not_look_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes nothing the second time is found, though the right result lay in that very memory."""
    memory = torch.empty(1000, device=timing.current_device())
    calls: list[int] = []

    def prepare(_size: int, draw: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        right = draw(1000)

        def work() -> torch.Tensor:
            if not calls:
                memory.copy_(right)
            calls.append(1)
            return memory

        return work

    monkeypatch.setattr(digest, "KINDS", {"lazy": digest.DigestKind(prepare=prepare, capability=(0, 0))})
    assert small(rounds=3, kinds=["lazy"]).differing == {"lazy": 2}


def test_results_are_plain_and_progress_is_told() -> None:
    """Digests cross a process and a JSON file unchanged."""
    heard: list[str] = []
    progress.listen(lambda step, _fraction: heard.append(step))
    try:
        found = small(heat_s=0.01)
    finally:
        progress.listen(lambda _step, _fraction: None)
    assert from_plain(json.loads(json.dumps(to_plain(found), allow_nan=False))) == found
    assert heard == ["round 0", "round 1", "heating for 0.01 s", "round 2", "round 3"]


def test_only_sums_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read a round: two sums a block and kind, never an output."""
    read: list[int] = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (read.append(tensor.numel()), real(tensor))[1])
    small(rounds=3)
    blocks = sum(-(-bits // 32 // digest.BLOCK) for bits in BITS.values())
    assert read == [2 * blocks] * 3


def test_surroundings_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside: repeatable kernels only, float32 never TF32. Outside: as before, also after an error."""
    seen: list[tuple[bool, str]] = []

    def prepare(_size: int, _draw: object) -> Callable[[], torch.Tensor]:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()))
        raise ArithmeticError("planted")

    monkeypatch.setattr(digest, "KINDS", {"broken": digest.DigestKind(prepare=prepare, capability=(0, 0))})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ArithmeticError, match="planted"):
            small(kinds=["broken"])
        assert seen == [(True, "highest")]
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(before)


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kinds": ["bf16", "fp4"]}, "unknown kinds fp4; valid: bf16, fp8, fp32, attention, softmax, reduction"),
        ({"flips": [{"kind": "fp4", "bit": 0}]}, "unknown kinds fp4"),
        ({"kinds": []}, "at least one kind"),
        ({"rounds": 0}, "one round"),
        ({"size": 0}, "multiple of 16"),
        ({"size": 72}, "multiple of 16, not 72"),
        ({"flips": [{"kind": "bf16", "bit": -1}]}, "cannot happen"),
        ({"flips": [{"kind": "bf16", "bit": 0, "round": 2}]}, "cannot happen"),
        ({"flips": [{"kind": "bf16", "bit": 0, "round": 4}], "heat_s": 0.01}, "cannot happen"),
        ({"flips": [{"kind": "bf16", "bit": 0}], "kinds": ["fp8"]}, "cannot happen"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Before anything is computed, and with the way out."""
    with pytest.raises(ValueError, match=reason):
        small(**changes)


def test_kinds_a_gpu_does_not_have_are_excluded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 has no float8 product; the others are done there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    reasons = {kind: digest._why_excluded(entry.capability, kind) for kind, entry in digest.KINDS.items()}
    assert reasons.pop("fp8") == "needs compute capability 8.9, NVIDIA A100-SXM4-80GB has 8.0"
    assert set(reasons.values()) == {None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a CPU build of torch")
def test_torch_without_a_float8_product_excludes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in the result; where nothing is left, it is an error and never an empty success."""
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda _name, _key: False)
    found = small(kinds=["fp8", "softmax"])
    assert [*found.digests] == ["softmax"]
    assert found.excluded == {"fp8": f"torch {torch.__version__} has no float8 product for CPUs"}
    with pytest.raises(RuntimeError, match=r"nothing to compute: .*no float8 product"):
        small(kinds=["fp8"])


# --- several devices ---


def of_ranks(monkeypatch: pytest.MonkeyPatch, count: int, **changes: Any) -> list[digest.Digests]:
    """The digests of each rank."""
    found = []
    for rank in range(count):
        monkeypatch.setenv("RANK", str(rank))
        found.append(small(**changes))
    return found


def against(found: list[digest.Digests]) -> dict[int, dict[str, str]]:
    """The suspicions against each rank."""
    return suspicions(
        {rank: one.digests for rank, one in enumerate(found)}, {rank: one.model for rank, one in enumerate(found)}
    )


@pytest.mark.fault
def test_one_that_is_always_wrong_is_named_by_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong GPU agrees with itself in every round; only a comparison with others shows it."""
    found = of_ranks(monkeypatch, 3, flips=[{"kind": "attention", "bit": 77, "rank": 1}])
    assert [sum(one.differing.values()) for one in found] == [0, 0, 0]
    assert against(found) == {0: {}, 1: {"attention": "1 of 3 is not like the others"}, 2: {}}


@pytest.mark.fault
def test_two_that_differ_are_said_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is named alone."""
    found = of_ranks(monkeypatch, 2, flips=[{"kind": "fp8", "bit": 5, "rank": 0}])
    words = "0 and 1 differ; it takes three to say which is wrong"
    assert against(found) == {0: {"fp8": words}, 1: {"fp8": words}}


@pytest.mark.fault
def test_once_in_a_thousand_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its first digest, but its repeats: the second of two is named without a majority."""
    flips = [{"kind": "reduction", "bit": 1, "rank": 1, "round": 777}]
    found = of_ranks(monkeypatch, 2, rounds=1000, kinds=["reduction"], flips=flips)
    assert [one.differing for one in found] == [{"reduction": 0}, {"reduction": 1}]
    assert found[1].differing_rounds == {"reduction": [777]}
    assert against(found) == {0: {}, 1: {}}


@pytest.mark.long
@pytest.mark.e2e
def test_two_processes_agree() -> None:
    """Another process has other addresses, hashes and history, and the same digests."""
    program = (
        "import dataclasses, json; from pytest_gpucluster.measurements import digest; "
        f"print(json.dumps(dataclasses.asdict(digest.digests(rounds=2, size={SIZE}, seed=7))))"
    )
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": path, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **fixed}, stdout=subprocess.PIPE, text=True, check=True, timeout=90
    )
    other, own = json.loads(done.stdout), dataclasses.asdict(small())
    same = ("digests", "model", "differing", "differing_rounds", "rounds", "excluded", "device")
    assert {name: other[name] for name in same} == {name: own[name] for name in same}
    assert set(other) == set(own)

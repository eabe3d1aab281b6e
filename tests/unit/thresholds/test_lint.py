"""Why a thresholds file is refused, at which line and in which words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.layers import read_source
from pytest_gpucluster.thresholds.lint import check, load
from pytest_gpucluster.thresholds.schema import File

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[str], Path]

GOOD = (Path(__file__).parent / "good_thresholds.yaml").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file named site.yaml into the working directory."""
    monkeypatch.chdir(tmp_path)

    def to_file(text: str) -> Path:
        path = tmp_path / "site.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def problems_of(path: Path) -> list[str]:
    """The lines of the error that loading a bad file raises."""
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    return str(caught.value).splitlines()


# Refusals: text of the good file, its replacement, and the expected message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema: 1", "schema: 2", "site.yaml:1: 'schema' is 2. Choose from: 1."),
        ("schema: 1", "schema: true", "site.yaml:1: 'schema' is 'true'. Choose from: 1."),
        ("schema: 1", "schema: 1.0", "site.yaml:1: 'schema' is '1.0'. Choose from: 1."),
        ("schema: 1", "limits: {}", "'limits' is not a key of a thresholds file. Keys: schema, extends, cluster"),
        ("schema: 1", "", "site.yaml:2: 'schema' is missing."),
        ("nodes: 2, gpus_per_node: auto", "nodes: all", "site.yaml:2: 'nodes' must be 'auto' or a whole number"),
        ("{nodes: 2,", "{hosts: 2,", "site.yaml:2: 'hosts' is not a key of the cluster section (in 'cluster')"),
        ("auto}", "auto, shared_paths: [mnt]}", "site.yaml:2: 'shared_paths' must be a list of absolute paths of folders"),
        ("auto}", "auto, shared_paths: [/]}", "site.yaml:2: 'shared_paths' must be a list of absolute paths of folders"),
        ("auto}", "auto, shared_paths: /mnt}", "site.yaml:2: 'shared_paths' must be a list of absolute paths of folders"),
        (
            "auto}",
            "auto, kernel_log: true}",
            "site.yaml:2: 'kernel_log' is true (in 'cluster'). Choose from: required, optional.",
        ),
        ("fabric: infiniband", "fabric: infinband", "is 'infinband' (in profile 'h200-sxm'). Choose from: infiniband,"),
        ("fabric: infiniband", "fabrik: roce", "site.yaml:4: 'fabrik' is not a key of a profile (in profile"),
        ("accept_at: quick", "accept_at: fast", "site.yaml:5: 'accept_at' is 'fast' (in profile 'lab'). Choose from:"),
        ("nodes: 2, gpus_per_node: 2", "nodes: 0", "site.yaml:5: 'nodes' must be a whole number from 1 to 4096, not 0"),
        ("nodes: 2, gpus_per_node: 2", "gpus_per_node: 65", "site.yaml:5: 'gpus_per_node' must be a whole number from 1 to 64"),
        ("{nodes: 2,", "{nodes: 4097,", "site.yaml:2: 'nodes' must be 'auto' or a whole number from 1 to 4096, not 4097"),
        ("node: auto}", "node: 65}", "site.yaml:2: 'gpus_per_node' must be 'auto' or a whole number from 1 to 64, not 65"),
        ("{nodes: 2,", "{nodes: 9007199254740992,", "from 1 to 4096, not 9007199254740992"),
        ("above: 700", "above: 680,5", "'above' must be a number or a table"),
        ("{above: 0.001,", "{above: 680,5,", "the key 5 must be text (in 'bf16_tflops', profile 'rehearsal')."),
        ("  lab: {", "  ' lab': {", "site.yaml:5: ' lab' cannot be a profile's name: printable text without spaces around it."),
        ("  lab: {", '  "l\\e[31mb": {', "site.yaml:5: 'l\\x1b[31mb' cannot be a profile's name"),
        ("  lab: {", '  "l\\nb": {', "site.yaml:5: 'l\\nb' cannot be a profile's name"),
        ("  lab: {", '  "": {', "site.yaml:5: '' cannot be a profile's name"),
        ("{inherits: h200-sxm,", "{inherits: h200-sxm, gpu: null,", "site.yaml:5: profile 'lab' has no 'gpu' and is not a re"),
        (
            "{rehearsal: true}",
            "{rehearsal: true}\n  sub: {inherits: rehearsal, rehearsal: false}",
            "profile 'sub' has no 'gpu'",
        ),
        ("rehearsal: true", "rehearsal: yes", "site.yaml:6: 'rehearsal' must be true or false, not 'yes'"),
        ("{rehearsal: true}", "{}", "site.yaml:6: profile 'rehearsal' has no 'gpu' and is not a rehearsal"),
        ("{gpu: h200-sxm,", "{gpu: h200,", "site.yaml:4: profile 'h200-sxm' names the GPU 'h200', which has no spec."),
        ("inherits: h200-sxm", "inherits: h200_sxm", "inherits 'h200_sxm', which is not a profile. Profiles:"),
        ("{gpu: h200-sxm,", "{gpu: h200-sxm, inherits: lab,", "site.yaml:4: profile 'h200-sxm' inherits itself in a"),
        ("above: 700", "minimum: 700", "site.yaml:11: 'minimum' is not a key of a threshold (in 'bf16_tflops'). Keys:"),
        ("above: 700", "minimum: 700", "Did you mean 'min'?"),
        ("above: 700", "above: fast", "site.yaml:11: 'above' must be a number or a table of numbers by GPUs in the"),
        ("above: 700", "above: '700'", "not '700' (in 'bf16_tflops')."),
        ("above: 700", "above: true", "not true (in 'bf16_tflops')."),
        ("above: 700", "above: null", "not nothing (in 'bf16_tflops')."),
        ("above: 700", "above: [700]", "site.yaml:11: 'above' must be a number or a table"),
        ("{2: 310, 8: 400}", "{two: 310}", "site.yaml:37: 'above' must be a number or a table"),
        ("{2: 310, 8: 400}", "{}", "site.yaml:37: 'above' must be a number or a table"),
        ("{2: 310, 8: 400}", "{0: 310}", "site.yaml:37: 'above' must be a number or a table"),
        ("    above: 700\n", "", "site.yaml:8: no limit (in 'bf16_tflops'): one of above, below, min, max."),
        ("above: 700", "min: 5\n    max: 3", "site.yaml:12: one limit only (in 'bf16_tflops'): found min and max."),
        ("above: 700", "min: 5\n    max: 3", "Nothing could pass: min 5 is above max 3."),
        ("above: 700", "above: 700\n    min: 3", "one limit only (in 'bf16_tflops'): found above and min."),
        ("above: 0.001,", "above: 1, below: 2,", "one limit only (in 'bf16_tflops', profile 'rehearsal')"),
        ("        min: 0.5\n", "", "'of' without a limit beside it (in 'bf16_tflops', profile 'lab')"),
        ("unit: TFLOPS", "unit: TFLOP", "site.yaml:12: 'unit' is 'TFLOP' (in 'bf16_tflops'). Choose from: TFLOPS,"),
        ("unit: TFLOPS", "unit: TFLOP", "Did you mean 'TFLOPS'?"),
        ("unit: GB/s", "unit: gbps", "site.yaml:38: 'unit' is 'gbps' (in 'busbw[all_reduce]')"),
        ("    unit: TFLOPS\n", "", "site.yaml:8: 'unit' is missing (in 'bf16_tflops')."),
        ("    why: a reason\n", "", "site.yaml:8: 'why' is missing (in 'bf16_tflops')."),
        ("why: a reason", "why: ''", "site.yaml:16: 'why' must be text that is not empty"),
        ("above: 0.001, bound_waived: a CPU", "skip: '--'", "'skip' must be text with a word in it, not '--' (in 'bf16_"),
        ("    source: a measurement\n", "", "site.yaml:8: 'source' is missing (in 'bf16_tflops')."),
        ("per: gpu", "per: rack", "site.yaml:10: 'per' is 'rack' (in 'bf16_tflops'). Choose from: gpu, node, cluster."),
        ("    criterion: Every GPU is fast.\n", "", "site.yaml:8: 'criterion' is missing (in 'bf16_tflops')."),
        ("noise: 0.03", "noise: 3", "site.yaml:14: 'noise' must be below 1, not 3 (in 'bf16_tflops')."),
        ("noise: 0.03", "deadline_s: 0", "site.yaml:14: 'deadline_s' must be above 0, not 0 (in 'bf16_tflops')."),
        ("noise: 0.03", "takes_s: -1", "site.yaml:14: 'takes_s' must be above 0, not -1 (in 'bf16_tflops')."),
        ("noise: 0.03", "takes_s: 1e9", "site.yaml:14: 'takes_s' must be at most 86400, not 1000000000.0 (in"),
        ("noise: 0.03", "takes_s: soon", "site.yaml:14: 'takes_s' must be a number, not 'soon' (in 'bf16_tflops')."),
        ("noise: 0.03", "measured_with: gpu_cuont", "site.yaml:14: 'bf16_tflops' is measured with 'gpu_cuont', which is no"),
        ("noise: 0.03", "measured_with: gpu_cuont", "no other criterion. Did you mean 'gpu_count'?"),
        ("noise: 0.03", "measured_with: bf16_tflops", "is measured with 'bf16_tflops', which is no other criterion."),
        ("noise: 0.03", "measured_with: gpu_count\n    takes_s: 2", "'takes_s' belongs to the entry that has the measurement"),
        ("noise: 0.03", "severity: soft", "'severity' is 'soft' (in 'bf16_tflops'). Choose from: required, advisory."),
        ("noise: 0.03", "level: slow", "'level' is 'slow' (in 'bf16_tflops'). Choose from: quick, standard, soak."),
        ("needs: 2", "needs: 2.5", "site.yaml:39: 'needs' must be a mapping, not 2.5 (in 'busbw[all_reduce]')."),
        (
            "needs: 2",
            "needs: 0",
            "site.yaml:39: 'places' must be a whole number above 0, not 0 ('needs' of 'busbw[",
        ),
        (
            "needs: 2",
            "needs: {node: 2}",
            "site.yaml:39: 'node' is not a key of 'needs' ('needs' of 'busbw[all_reduce]'). Ke",
        ),
        ("needs: 2", "needs: {node: 2}", "Did you mean 'nodes'?"),
        ("needs: 2", "needs: 2\n    needs_slurm: 1", "site.yaml:40: 'slurm' must be true or false, not 1 ('needs' of 'bus"),
        ("recipe: {iterations: 5}", "needs: {nodes: no}", "'nodes' must be a whole number above 0, not 'no' ('needs' of"),
        ("recipe: {iterations: 5}", "recipe: {5: 5}", "'recipe' must be a mapping of plain data with text keys (in"),
        ("of: cluster.gpus_per_node", "of: cluster.gpus", "site.yaml:28: 'of' is 'cluster.gpus' (in 'gpu_count')."),
        ("of: cluster.gpus_per_node", "of: fabric.ring", "site.yaml:28: 'of' is 'fabric.ring' (in 'gpu_count')."),
        ("of: cluster.gpus_per_node", "of: fabric.ring_gb_s", "is in GPUs, but 'of' fabric.ring_gb_s is in GB/s."),
        ("bound: gpu.bf16_tflops", "bound: 650", "'bf16_tflops': 'above: 700' asks for more than its 'bound: 650' allows."),
        ("bound: gpu.bf16_tflops", "bound: []", "'bound' must be a number in the entry's unit, or a figure such as gpu"),
        ("bound: gpu.bf16_tflops", "bound: fabric.most_gb_s", "is in TFLOPS, but 'bound' fabric.most_gb_s is in GB/s."),
        ("bound: gpu.bf16_tflops", "bound: fabric.ring_gb_s", "a bound is physics, so of the form gpu.<field> (in"),
        (
            "per: node\n    above: {2: 310, 8: 400}",
            "per: cluster\n    above: 1.2\n    of: fabric.ring_gb_s",
            "more than there is.",
        ),
        ("{2: 310, 8: 400}", "300\n    shapes: {2x8: 350}", "'busbw[all_reduce]': 'shapes' are of the whole cluster, and"),
        ("{2: 310, 8: 400}", "300\n    shapes: {8: 350}", "site.yaml:38: 'shapes' must be a table of numbers by nodes x GPUs"),
        ("{2: 310, 8: 400}", "300\n    shapes: {0x8: 350}", "site.yaml:38: 'shapes' must be a table of numbers by nodes x"),
        ("{2: 310, 8: 400}", "300\n    shapes: {}", "site.yaml:38: 'shapes' must be a table of numbers by nodes x GPUs"),
        ("{2: 310, 8: 400}", "300\n    shapes: {2x8: -1}", "'above: -1' is negative; GB/s never is."),
        ("recipe: {iterations: 5}", "shapes: {2x8: 5}\n        recipe: {iterations: 5}", "'shapes' are of the whole"),
        *(
            ("{rehearsal: true}", f"{{rehearsal: true, rules: {rules}}}", f"site.yaml:6: {expected}")
            for rules, expected in (
                ("[x]", "'rules' must be a mapping, not a list (in profile 'rehearsal')."),
                ("{x: {above: 0}}", "'for' is missing (in rule 'x' of profile 'rehearsal')."),
                ("{x: {for: '*'}}", "'for' must be a list, not '*' (in rule 'x' of profile 'rehearsal')."),
                ("{x: {for: []}}", "'for' must be a list that is not empty"),
                (
                    "{x: {for: ['*'], abve: 0}}",
                    "'abve' is not a key of a rule (in rule 'x' of profile 'rehearsal'). Keys:",
                ),
                (
                    "{x: {for: ['*'], above: 0, max: 1}}",
                    "one limit only (in rule 'x' of profile 'rehearsal'): found above",
                ),
                ("{x: {for: ['bus*'], above: -1}}", "'busbw[all_reduce]': 'above: -1' is negative; GB/s never is."),
                (
                    "{x: {for: [bf16_tflop], above: 0}}",
                    "'bf16_tflop' is no criterion (in rule 'x' of profile 'rehearsal'). Di",
                ),
                ("{x: {for: ['*', 'bf16*x'], above: 0}}", "'bf16*x' is no criterion (in rule 'x' of profile 'rehearsal')."),
            )
        ),
        ("{rehearsal: true}", "{rehearsal: true, nic_gb_s_per_gpu: 0}", "'nic_gb_s_per_gpu' must be above 0, not 0"),
        ("bound: gpu.bf16_tflops", "bound: gpu.bf16_tflop", "Did you mean 'gpu.bf16_tflops'?"),
        ("noise: 0.03", "requires: gpu.fp8_tflop", "site.yaml:14: 'requires' is 'gpu.fp8_tflop' (in 'bf16_tflops'). Choose"),
        ("noise: 0.03", "requires: gpu.fp8_tflop", "Did you mean 'gpu.fp8_tflops'?"),
        ("noise: 0.03", "requires: cluster.nodes", "what a GPU may lack stands in its spec, so of the form gpu.<field> (in"),
        ("bound: gpu.bf16_tflops", "bound: cluster.nodes", "a bound is physics, so of the form gpu.<field> (in"),
        ("bound: gpu.bf16_tflops", "bound: gpu.hbm_tb_s", "is in TFLOPS, but 'bound' gpu.hbm_tb_s is in TB/s."),
        ("unit: GPUs", "unit: nodes", "'gpu_count' is in nodes, but 'of' cluster.gpus_per_node is in GPUs."),
        ("      lab:", "      lba:", "site.yaml:19: 'lba' is not a profile (in 'bf16_tflops'). Profiles: h200-sxm,"),
        ("        recipe: {it", "        recpie: {it", "site.yaml:22: 'recpie' is not a key of an override (in"),
        ("above: 700", "above: 1200", "site.yaml:11: 'bf16_tflops': 1200 TFLOPS is 121 % of gpu.bf16_tflops = 989"),
        ("above: 700", "above: 300", "is 30 % of gpu.bf16_tflops = 989 (profile 'h200-sxm'); a floor lies between"),
        ("above: 700", "above: 300", "105 %. For one kind of GPU write it under 'profiles: {NAME: ...}'; or say 'bound_waived"),
        ("min: 0.5\n", "min: 0.3\n", "site.yaml:20: 'bf16_tflops': 296.7 TFLOPS is 30 % of gpu.bf16_tflops = 989"),
        ("above: 0.001, bound_waived: a CPU", "above: 0.001", "for profile 'rehearsal': it has no GPU. Skip it"),
        ("above: 700", "below: 700", "site.yaml:11: 'bf16_tflops': 'bound' belongs to a floor (above, min), not to"),
        ("above: 700", "above: -1", "site.yaml:11: 'bf16_tflops': 'above: -1' is negative; TFLOPS never is."),
        ("min: 1\n", "min: 0\n", "'gpu_count': 'min: 0' GPUs holds for every value: it is no limit."),
        ("min: 1\n", "below: 0\n", "'gpu_count': 'below: 0' GPUs can hold for no value."),
        ("above: {2: 310, 8: 400}\n    unit: GB/s", "max: 1\n    unit: ratio", "'max: 1' ratio holds for every value"),
        ("above: {2: 310, 8: 400}\n    unit: GB/s", "max: 100\n    unit: '%'", "'max: 100' % holds for every value"),
        ("min: 1\n", "min: 2\n", "'gpu_count': 'min: 2' of cluster.gpus_per_node asks for more than there is."),
        ("unit: GB/s", "unit: ratio", "site.yaml:37: 'busbw[all_reduce]': 'above: 310' lies outside 0..1, where a"),
        ("unit: GB/s", "unit: '%'", "site.yaml:37: 'busbw[all_reduce]': 'above: 310' lies outside 0..100, where a"),
        ("  gpu_count:", "  GpuCount:", "site.yaml:24: 'GpuCount' cannot be a test's name"),
        ("  gpu_count:", "  7:", "site.yaml:24: the key 7 must be text"),
        ("{skip: no GPU}", "{skip: true}", "site.yaml:33: 'skip' must be text, not true (in 'gpu_count', profile"),
        ("{skip: no GPU}", "quiet", "'rehearsal' must be a mapping, not 'quiet' (in 'gpu_count')."),
        # YAML itself
        ("above: 700", "above: .nan", "site.yaml:11: .nan is not a number that anything can be compared with."),
        ("above: 700", "above: -.inf", "site.yaml:11: -.inf is not a number"),
        ("above: 700", "above: 1e999", "site.yaml:11: 1e999 is too large"),
        ("above: 700", "above: 99999999999999999999", "site.yaml:11: 99999999999999999999 is too large"),
        ("above: 700", "above: 0700", "site.yaml:11: 'above' must be a number"),
        ("above: 700", "above: 700\n    above: 600", "site.yaml:12: 'above' is there twice; first in line 11."),
        ("  gpu_count:", "  bf16_tflops:", "site.yaml:24: 'bf16_tflops' is there twice; first in line 8."),
        ("above: 700", "above: &a 700", "site.yaml:11: the anchor '&a' is not allowed"),
        ("above: 700", "above: *a", "site.yaml:11: the alias '*a' is not allowed"),
        ("above: 700", "above: !!float 700", "site.yaml:11: the tag '!!float' is not allowed: plain data only."),
        ("above: 700", "<<: {above: 700}", "site.yaml:11: the merge key '<<' is not allowed"),
        ("above: 700", "? [a]\n    : 1", "site.yaml:11: a key must be text or a whole number."),
        ("above: 700", "true: 700", "site.yaml:11: a key must be text or a whole number."),
        ("above: 700", "above: {2: 310", "not YAML: while parsing a flow mapping"),
        ("above: 700", "\tabove: 700", "site.yaml:11: not YAML"),
        ("above: 700", "above: \x00", "site.yaml:11: not YAML: a character that text may not hold."),
        ("criteria:\n", "---\ncriteria:\n", "site.yaml:7: a second document ('---'): one file holds one."),
        ("schema: 1", "schema: 1\nextends: site", "site.yaml:2: 'extends' must be 'packaged', not 'site'."),
    ],
)
def test_a_bad_file_is_refused_with_line_and_words(old: str, new: str, expected: str, write: Write) -> None:
    """Each fault, in an otherwise good file, is one line that starts with the file and line and says what is valid."""
    assert old in GOOD
    lines = problems_of(write(GOOD.replace(old, new, 1)))
    assert any(expected in line for line in lines), lines
    assert all(line.startswith("site.yaml:") for line in lines)


def test_the_good_file_is_good(write: Write) -> None:
    """The file that each refusal above breaks has no problem itself."""
    assert check(write(GOOD))[1] == []


SAMPLE = """
  bf16_tflops:
    criterion: Every GPU reaches the dense BF16 rate.
    above: 700                     # above/below are strict, min/max inclusive; or: min: 0.75, of: gpu.bf16_tflops
    unit: TFLOPS
    profiles: {a100-sxm: {above: 250}}
    recipe: {sizes: [4096, 8192, 16384], judged: best size, statistic: median,
             iterations: 50, warmup_s: 2, data: randn, at_once: all}
    level: quick                   # the lowest level that runs it
    noise: 0.03                    # relative spread of repeats above which the value is not judged
    bound: gpu.bf16_tflops         # lint: a floor lies between 40 % and 105 % of it, else `bound_waived: reason`
    why: a reason
    source: a measurement
"""


def test_an_entry_without_per_is_about_each_gpu(write: Write) -> None:
    """An entry with a limit, a recipe, a level and a bound needs no ``per``."""
    profiles = "profiles: {h100-sxm: {gpu: h100-sxm, fabric: infiniband}, a100-sxm: {gpu: a100-sxm}}"
    path = write(f"schema: 1\n{profiles}\ncriteria:{SAMPLE}")
    assert check(path)[1] == []
    file = load(path)
    entries = [file.criteria(profile)["bf16_tflops"] for profile in file.profiles.values()]
    assert [(entry.per, entry.written_limit) for entry in entries] == [("gpu", "above 700"), ("gpu", "above 250")]


def test_a_left_out_per_is_no_change_of_one_that_says_gpu(write: Write) -> None:
    """The default equals the written value; another value differs."""
    written, left_out, node = (
        load(write(text)).criteria(None)["bf16_tflops"]
        for text in (GOOD, GOOD.replace("    per: gpu\n", ""), GOOD.replace("per: gpu", "per: node"))
    )
    assert written.differences(left_out) == []
    assert written.differences(node) == ["per"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "site.yaml:1: empty"),
        (b"# nothing\n", "empty: a mapping was expected."),
        (b"- a\n- b\n", "site.yaml:1: a mapping ('key: value') was expected at the top."),
        (b"just text", "site.yaml:1: a mapping"),
        (b"schema: 1\na: \xff\n", "site.yaml:2: not UTF-8 text."),
        (b"a: " + b"[" * 100, "site.yaml:1: nested deeper than 16 levels."),
        (b"a: [" + b"1," * 30_000 + b"]", "more than 20000 values"),
        (b"a: " + b"x" * (1 << 20), "site.yaml: larger than 1048576 bytes"),
    ],
)
def test_a_file_of_another_kind_is_refused(content: bytes, expected: str, write: Write) -> None:
    """An empty file, a list, a word, bytes that are no text, and input that is too deep, too long or too large."""
    path = write("")
    path.write_bytes(content)
    assert expected in problems_of(path)[0]


def test_missing_file_directory_and_pipe(tmp_path: Path) -> None:
    """A pipe without a writer is refused without being opened, so nothing hangs."""
    os.mkfifo(tmp_path / "pipe")
    assert "No such file" in problems_of(tmp_path / "absent.yaml")[0]
    assert "not a regular file" in problems_of(tmp_path)[0]
    assert "not a regular file" in problems_of(tmp_path / "pipe")[0]


def test_a_bomb_is_refused_at_once(write: Write) -> None:
    """Nine levels of nine aliases would be 10^9 nodes; the first anchor ends it."""
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    bomb += "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairs)
    lines = problems_of(write(bomb))
    assert lines == ["site.yaml:1: the anchor '&a' is not allowed: write the value out where it is used."]


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!run"])
def test_a_tag_is_refused_and_nothing_is_executed(tag: str, write: Write, tmp_path: Path) -> None:
    """Whatever the tag asks for, no object is constructed."""
    lines = problems_of(write(f"schema: 1\ncriteria: {tag} ['touch {tmp_path}/executed']\n"))
    assert lines == [f"site.yaml:2: the tag '{tag}' is not allowed: plain data only."]
    assert not (tmp_path / "executed").exists()


def test_all_problems_at_once_but_at_most_ten(write: Write) -> None:
    """The first ten problems in the file's order, one line each, then the number of the others."""
    bad = GOOD.replace("unit: TFLOPS", "unit: x").replace("needs: 2", "needs: 0").replace("per: node", "per: rack")
    assert [line.split(": ")[0] for line in problems_of(write(bad))] == [f"site.yaml:{n}" for n in (12, 26, 36, 39)]
    many = problems_of(write(GOOD + "".join(f"    bad{n}: 1\n" for n in range(12))))
    assert len(many) == 11
    assert many[-1] == "... and 2 more problems."


def test_a_broken_entry_does_not_hide_what_is_wrong_with_another(write: Write) -> None:
    """Shape and physics are reported together."""
    lines = problems_of(write(GOOD.replace("unit: GB/s", "unit: x").replace("above: 700", "above: 1200")))
    assert ["121 %" in line for line in lines] == [True, False]


def test_a_fault_in_another_profile_is_found(write: Write) -> None:
    """The whole file is checked whatever the profile, each line once."""
    lines = problems_of(write(GOOD.replace("min: 0.5\n", "min: 1.2\n")))
    assert len(lines) == 1
    assert "profile 'lab'" in lines[0]


def test_bound_waived_lets_an_odd_floor_through(write: Write) -> None:
    """A waived bound needs a reason; a limit that replaces it needs its own."""
    waived = GOOD.replace("above: 700", "above: 100\n    bound_waived: a slow clock by contract")
    assert check(write(waived))[1] == []
    assert "profile 'rehearsal'" in str(check(write(waived.replace("bound_waived: a CPU, ", "")))[1][0])


BETWEEN = "per: cluster\n    above: 0.8\n    of: fabric.ring_gb_s\n    shapes: {%s}"


@pytest.mark.parametrize(
    ("shapes", "nic", "expected"),
    [
        ("2x8: 350, 12x8: 300, 2x4: 300", 50, None),
        ("2x4: 350", 50, "'busbw[all_reduce]': 350 GB/s for 2x4 is more than any all-reduce can reach there, 350 (profile"),
        ("2x8: 350", 20, "350 GB/s for 2x8 is more than any all-reduce can reach there, 300 (profile 'h200-sxm': 20 GB/s of"),
        ("1x8: 350", 50, "'busbw[all_reduce]': the shape 1x8 has nothing between nodes."),
    ],
)
def test_a_floor_that_no_cluster_of_the_shape_can_reach(shapes: str, nic: int, expected: str | None, write: Write) -> None:
    """Physics of the ports and the NVLinks; a possible floor is good."""
    text = GOOD.replace("per: node\n    above: {2: 310, 8: 400}", BETWEEN % shapes)
    path = write(text.replace("fabric: infiniband}", f"fabric: infiniband, nic_gb_s_per_gpu: {nic}}}"))
    assert not expected or any(expected in problem for problem in problems_of(path))
    assert expected or not check(path)[1]


@pytest.mark.parametrize(
    ("terms", "is_refused"),
    [
        ("", True),
        (", nodes: 2, gpus_per_node: 8", True),
        (", gpus_per_node: 8", True),
        (", gpus_per_node: 1", False),
        (", nodes: 4", False),
        (", nodes: 2, gpus_per_node: 1", False),
    ],
)
def test_a_shape_that_the_profile_rules_out_is_no_fault(terms: str, write: Write, *, is_refused: bool) -> None:
    """A site of one GPU a node on a slow network inherits the handover's limit for 2 x 8, which will never judge it."""
    text = GOOD.replace("per: node\n    above: {2: 310, 8: 400}", BETWEEN % "2x8: 350")
    path = write(text.replace("fabric: infiniband}", f"fabric: infiniband, nic_gb_s_per_gpu: 2{terms}}}"))
    assert not is_refused or any("Say 'nodes' and 'gpus_per_node' where" in problem for problem in problems_of(path))
    assert is_refused or not check(path)[1]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ("18x4: 700, 36x4: 700", None),
        (
            "18x4: 880",
            "880 GB/s for 18x4 is more than any all-reduce can reach there, 875.3 (profile 'h200-sxm': 50 GB/s",
        ),
        ("36x4: 900", "900 GB/s for 36x4 is more than any all-reduce can reach there, 881.5 (profile"),
    ],
)
def test_what_nvlink_joins_counts_as_one_node(shapes: str, expected: str | None, write: Write) -> None:
    """In a rack of 18 nodes the NVLinks of a GPU bound an all-reduce, not the ports of its node."""
    text = GOOD.replace("per: node\n    above: {2: 310, 8: 400}", BETWEEN % shapes)
    path = write(text.replace("fabric: infiniband}", "fabric: infiniband, nic_gb_s_per_gpu: 50, nodes_per_domain: 18}"))
    assert not expected or any(expected in problem for problem in problems_of(path)), problems_of(path)
    assert expected or not check(path)[1]


@pytest.mark.parametrize(("floor", "is_possible"), [(93, True), (94, False)])
def test_an_all_to_all_has_a_bound_of_its_own(floor: int, write: Write, *, is_possible: bool) -> None:
    """What an all-reduce can reach, an all_to_all cannot: 93.75 GB/s on 2 x 8 with ports of 50."""
    text = GOOD.replace("fabric: infiniband}", "fabric: infiniband, nic_gb_s_per_gpu: 50}")
    between = BETWEEN.replace("ring_gb_s", "all_to_all_gb_s") % f"2x8: {floor}"
    path = write(text.replace("per: node\n    above: {2: 310, 8: 400}", between))
    expected = "94 GB/s for 2x8 is more than any all_to_all can reach there, 93.75 (profile"
    assert is_possible or any(expected in problem for problem in problems_of(path))
    assert not is_possible or not check(path)[1]


def test_of_a_gpu_without_that_number(write: Write) -> None:
    """A100 has no FP8, so no limit can be a part of it."""
    text = GOOD.replace("{gpu: h200-sxm,", "{gpu: a100-sxm,").replace("bound: gpu.bf16_tflops", "bound: gpu.fp8_tflops")
    assert "A100 SXM 80 GB has no gpu.fp8_tflops" in problems_of(write(text))[0]


# An overlay that is none, and names that are nearly right

ENTRY = "  {name}: {{above: 650}}\n"
FORGOTTEN = "site.yaml:1: did you forget `extends: packaged`?"


@pytest.mark.parametrize(
    "text",
    [
        "schema: 1\ncriteria:\n  bf16_tflops: {above: 650}\n",
        "schema: 1\nprofiles: {rehearsal: {rehearsal: true}}\ncriteria:\n  bf16_tflops: {above: 650}\n",
        "schema: 1\nprofiles: {site: {inherits: h200-sxm}}\ncriteria:\n  bf16_tflops: {above: 650}\n",
        "schema: 1\ncluster: {nodes: 2}\n",
        "criteria:\n  bf16_tflops: {above: 650}\n",
        "schema: 1\nextend: packaged\ncriteria:\n  bf16_tflops: {above: 650}\n",
    ],
)
def test_a_forgotten_extends_is_said_first(text: str, write: Write) -> None:
    """What looks like an overlay and has no ``extends``; what is missing follows."""
    lines = problems_of(write(text))
    assert lines[0].startswith(FORGOTTEN)
    assert len(lines) > 1
    assert not any(FORGOTTEN in line for line in lines[1:])


def test_a_whole_file_with_a_fault_forgot_nothing(write: Write) -> None:
    """A file that stands alone, with a missing key of an entry of its own, and an overlay with a fault."""
    own = GOOD.replace("gpu_count:", "my_count:").replace("busbw[all_reduce]", "mine").replace("bf16_tflops:", "rate:")
    assert not any("forget" in line for line in problems_of(write(own.replace("    unit: TFLOPS\n", ""))))
    assert not any("forget" in line for line in problems_of(write("schema: 1\nextends: packaged\ncriteria: {x: {min: 1}}\n")))


@pytest.mark.parametrize(
    ("name", "near"),
    [("bf16_tflop", "bf16_tflops"), ("hbm_bandwith", "hbm_bandwidth"), ('"busbw[all_reduc]"', "busbw[all_reduce]")],
)
def test_a_misspelt_packaged_name_is_one_line(name: str, near: str, write: Write) -> None:
    """Instead of a line for each key that a new entry would need."""
    lines = problems_of(write(f"schema: 1\nextends: packaged\ncriteria:\n{ENTRY.format(name=name)}"))
    shown = name.strip('"')
    needs = "criterion, unit, why, source"
    told = f"{shown!r} is no packaged criterion, and a new one also needs {needs}. Did you mean {near!r}?"
    assert lines == [f"site.yaml:4: {told}"]


def test_all_problems_at_once_with_a_wrong_extends(write: Write) -> None:
    """What is wrong below is checked as if it said ``packaged``."""
    text = "schema: 1\nextends: packagd\ncriteria:\n  bf16_tflops: {abvoe: 650, noise: 3}\n  hbm_bandwidth: {min: -1}\n"
    lines = problems_of(write(text))
    assert [line.split(": ")[0] for line in lines] == [f"site.yaml:{number}" for number in (2, 4, 4, 5)]
    assert lines[0] == "site.yaml:2: 'extends' must be 'packaged', not 'packagd'. Did you mean 'packaged'?"
    assert any("'abvoe'" in line and "Did you mean 'above'?" in line for line in lines)
    assert any("'noise' must be below 1" in line for line in lines)
    assert any("negative" in line for line in lines)


@pytest.mark.parametrize(
    ("limit", "unit", "expected"),
    [
        ("min: 500", "MB/s", " For 500 MB/s say 0.5 GB/s."),
        ("above: 400", "Gb/s", " For 400 Gb/s say 50 GB/s."),
        ("above: 0.4", "Tbit/s", " For 0.4 Tbit/s say 50 GB/s."),
        ("min: 1073.741824", "MB", " For 1073.741824 MB say 1 GiB."),
        ("min: {2: 5, any: 6}", "MB/s", " 1 MB/s is 0.001 GB/s."),
        ("min: 5", "TFLOP", " Did you mean 'TFLOPS'?"),
        ("min: 5", "tflops", " Did you mean 'TFLOPS'?"),
        ("min: 5", "GByte/s", " Did you mean 'GB/s'?"),
        ("min: 5", "gpus", " Did you mean 'GPUs'?"),
        ("min: 5", "mb/s", ""),
        ("min: 5", "furlongs", ""),
    ],
)
def test_the_hint_of_a_wrong_unit(limit: str, unit: str, expected: str, write: Write) -> None:
    """Another unit is converted with its number. A unit of another size is never suggested as another spelling."""
    entry = f"  own: {{criterion: C, per: gpu, {limit}, unit: {unit}, why: a reason, source: a contract}}\n"
    lines = problems_of(write(f"schema: 1\nextends: packaged\ncriteria:\n{entry}"))
    assert len(lines) == 1
    assert lines[0].split("links, count.")[1] == expected


@pytest.mark.parametrize(
    ("key", "per", "other"),
    [
        ("bf16_tflops", "gpu", "node"),
        ("bf16_tflops", "gpu", "cluster"),
        ("gpu_count", "node", "gpu"),
        ("busbw[all_reduce]", "node", "cluster"),
        ("busbw_scaling", "cluster", "node"),
    ],
)
def test_another_kind_of_place_than_its_test_judges(key: str, per: str, other: str, write: Write) -> None:
    """Collection alone noticed it, and blamed the packaged test. The kind that it has may be said."""
    text = f"schema: 1\nextends: packaged\ncriteria:\n  '{key}': {{per: PER}}\n"
    said = f"site.yaml:4: {key!r} is judged per {per}, not per {other}: leave 'per' out."
    assert problems_of(write(text.replace("PER", other))) == [said]
    assert check(write(text.replace("PER", per)))[1] == []


IN_FILES = {
    "an entry": "criteria:\n  bf16_tflops: {recipe: {%s}}\n",
    "an override": "criteria:\n  bf16_tflops: {profiles: {h200-sxm: {recipe: {%s}}}}\n",
    "a rule": "profiles:\n  h200-sxm: {rules: {ours: {for: [bf16_tflops], recipe: {%s}}}}\n",
}
INSIDE = {
    "an entry": "in 'bf16_tflops'",
    "an override": "in 'bf16_tflops', profile 'h200-sxm'",
    "a rule": "in rule 'ours' of profile 'h200-sxm'",
}


@pytest.mark.parametrize("where", IN_FILES)
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("iterations: 0", "'iterations' must be a number above 0, at most 1e+06, not 0"),
        ("iterations: -5", "'iterations' must be a number above 0, at most 1e+06, not -5"),
        ("iterations: 1e9", "'iterations' must be a number above 0, at most 1e+06, not 1000000000.0"),
        ("iterations: many", "'iterations' must be a number above 0, at most 1e+06, not 'many'"),
        ("iterations: null", "'iterations' must be a number above 0, at most 1e+06, not nothing"),
        ("iterations: true", "'iterations' must be a number above 0, at most 1e+06, not true"),
        ("sizes: [8192, 0]", "'sizes' must be a number above 0, at most 1.6384e+08, not 0"),
        ("sizes: []", "'sizes' must be a number above 0, at most 1.6384e+08, not a list"),
        ("warmup_s: -1", "'warmup_s' must be at least 0, not -1"),
        ("rest_s: -0.5", "'rest_s' must be at least 0, not -0.5"),
    ],
)
def test_a_recipe_that_measures_nothing(where: str, said: str, told: str, write: Write) -> None:
    """None or less than none of the work, or work that never ends: the run said so, hours later, and blamed software."""
    lines = problems_of(write(f"schema: 1\nextends: packaged\n{IN_FILES[where] % said}"))
    assert lines == [f"site.yaml:4: {told} ({INSIDE[where]})."]


@pytest.mark.parametrize("where", IN_FILES)
@pytest.mark.parametrize(
    "said", ["iterations: 500", "sizes: [4096]", "warmup_s: 0", "rest_s: 30", "dtype: float16", "at_once: 1"]
)
def test_another_recipe_is_fine(where: str, said: str, write: Write) -> None:
    """More or less of the same work, and what a pause may be; it is shown as a changed limit."""
    assert check(write(f"schema: 1\nextends: packaged\n{IN_FILES[where] % said}"))[1] == []


def test_a_site_may_repeat_every_packaged_recipe(write: Write) -> None:
    """Of each entry, in each profile that has its own: what was released is work enough, and not too much."""
    packaged = read_source(None).document.data["criteria"]
    own: dict[str, Any] = {key: {"recipe": entry["recipe"]} for key, entry in packaged.items() if "recipe" in entry}
    for key, entry in packaged.items():
        layers = {name: {"recipe": one["recipe"]} for name, one in entry.get("profiles", {}).items() if "recipe" in one}
        own.setdefault(key, {}).update({"profiles": layers} if layers else {})
    assert len(own) > 50
    assert check(write(json.dumps({"schema": 1, "extends": "packaged", "criteria": own})))[1] == []


def test_the_recipe_of_an_own_entry_is_its_own(write: Write) -> None:
    """Its test may give the same names another sense."""
    entry = "own: {criterion: C, min: 1, unit: count, why: a reason, source: a contract, recipe: {iterations: 0, rest_s: -1}}"
    assert check(write(f"schema: 1\nextends: packaged\ncriteria:\n  {entry}\n"))[1] == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("hbm_bandwidth: {unit: GB/s, above: 2000}", "TB/s GB/s For 2000 GB/s say 2 TB/s."),
        ("hbm_bandwidth: {unit: GB/s}", "TB/s GB/s"),
        ("hbm_bandwidth: {unit: GB/s, above: {8: 2000, any: 1}}", "TB/s GB/s"),
        ("host_to_device: {unit: TB/s, min: 0.05}", "GB/s TB/s For 0.05 TB/s say 50 GB/s."),
        ("launch_latency: {unit: ms, below: 0.05}", "us ms For 0.05 ms say 50 us."),
        ("hbm_bandwidth: {unit: ratio, above: 0.9}", "TB/s ratio"),
        (
            "hbm_bandwidth: {profiles: {h200-sxm: {unit: GB/s, above: 4100}}}",
            "TB/s GB/s For 4100 GB/s say 4.1 TB/s.",
        ),
    ],
)
def test_a_unit_that_its_test_does_not_measure_in(entry: str, said: str, write: Write) -> None:
    """The site's line is blamed, and no packaged one; the limit is converted where it is one number of the site's own."""
    lines = problems_of(write(f"schema: 1\nextends: packaged\ncriteria:\n  {entry}\n"))
    assert len(lines) == 1, lines
    where, _, message = lines[0].partition(": ")
    assert where == "site.yaml:4"
    name = entry.partition(":")[0]
    measured, unit, *more = said.split(" ", 2)
    inside = f" (in {name!r}, profile 'h200-sxm')" if "profiles" in entry else f" (in {name!r})"
    hint = "".join(f" {one}" for one in more)
    assert message == f"{name!r} is measured in {measured}, not in {unit}: leave 'unit' out{inside}.{hint}"


def test_the_packaged_unit_may_be_repeated(write: Write) -> None:
    """It changes nothing; an entry of one's own has what unit it likes."""
    load(write("schema: 1\nextends: packaged\ncriteria:\n  hbm_bandwidth: {unit: TB/s, above: 3.5}\n"))


@pytest.mark.parametrize("change", ["bound: 2.9", "bound: gpu.pcie_gb_s", "per: gpu\n    bound: 2.9"])
def test_a_change_that_spoils_packaged_limits_is_blamed_itself(change: str, write: Write) -> None:
    """Not the lines of the packaged file, which were good before."""
    lines = problems_of(write(f"schema: 1\nextends: packaged\ncriteria:\n  hbm_bandwidth:\n    {change}\n"))
    assert {line.partition(":")[0] for line in lines} == {"site.yaml"}
    assert len(lines) == len(set(lines))


def test_a_new_entry_in_another_unit_than_its_bound(write: Write) -> None:
    """The number is converted here too."""
    entry = "  own: {criterion: C, per: gpu, above: 2000, unit: GB/s, bound: gpu.hbm_tb_s, why: a reason, source: a contract}\n"
    (line,) = problems_of(write(f"schema: 1\nextends: packaged\ncriteria:\n{entry}"))
    assert line.startswith("site.yaml:4: 'own' is in GB/s, but 'bound' gpu.hbm_tb_s is in TB/s. Write it in TB/s.")
    assert line.endswith(" For 2000 GB/s say 2 TB/s.")


def test_the_schema_is_json_and_knows_every_key() -> None:
    """The schema is for editors. A limit may be left out but must not be null."""
    schema = File.model_json_schema(by_alias=True)
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == {"schema", "extends", "cluster", "profiles", "criteria", "versions"}
    entry = schema["$defs"]["CriterionEntry"]
    assert set(entry["required"]) == {"criterion", "unit", "why", "source"}
    assert entry["properties"]["per"]["default"] == "gpu"
    assert "default" not in entry["properties"]["above"]

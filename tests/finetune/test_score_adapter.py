"""``evaluate``: what counts as a right call, and an adapter against its base from both kinds of directory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_smoke.__main__ import main
from finetune_smoke.checkpoints import export
from finetune_smoke.checks import exact
from finetune_smoke.data import batches, calls, hub
from finetune_smoke.evaluation import heldout
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.fixed_ranks import ALONE, prepared
from tests.support.finetune.runs import QUICK, flip_a_bit, options, result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIONS = options({**QUICK, "audit_every": 0})
RIGHT = '{"name": "f", "arguments": {"a": "1", "b": "2"}}'


@pytest.mark.parametrize(
    ("given", "judged"),
    [
        (RIGHT, (True, True, True, True)),
        ('{"arguments": {"b": "2", "a": "1"}, "name": "f"}', (True, True, True, True)),
        ('{"name": "g", "arguments": {"a": "1", "b": "2"}}', (True, False, True, False)),
        ('{"name": "f", "arguments": {"a": "1"}}', (True, True, False, False)),
        ('{"name": "f", "arguments": {"a": "1", "b": "2", "c": "3"}}', (True, True, False, False)),
        ('{"name": "f"}', (False, False, False, False)),
        ('{"name": "f", "arguments": "a"}', (False, False, False, False)),
        ('{"name": "f", "arguments": {"a": NaN}}', (False, False, False, False)),
        ('{"name": "f", "arguments": {"a": -Infinity}}', (False, False, False, False)),
        ('{"name": "f", "arguments": [{"a": "1"}]}', (False, False, False, False)),
        ('{"name": "f", "arguments": {"a": "1", "b": "2"}}}', (False, False, False, False)),
        ('{"name": "f", "arguments": {"a"', (False, False, False, False)),
        ("[1]", (False, False, False, False)),
        ("", (False, False, False, False)),
    ],
)
def test_call_is_judged_by_its_parts(given: str, judged: tuple[bool, ...]) -> None:
    """JSON, name, arguments, both; the order of keys is no part of a call."""
    assert heldout.judge(RIGHT, given) == judged


@pytest.mark.parametrize("levels", [10, 900])
def test_deep_call_is_equal_to_itself(levels: int) -> None:
    """As deep as Python reads JSON, and not only as deep as it compares lists."""
    call = f'{{"name": "f", "arguments": {{"a": {"[" * levels}1{"]" * levels}}}}}'
    assert heldout.judge(call, call) == (True, True, True, True)
    assert heldout.judge(call, call.replace("1", "2")) == (True, True, False, False)


def test_call_of_glaive_is_read() -> None:
    """Its arguments are JSON in single quotes."""
    text = """{"name": "news", "arguments": '{"country": "US", "n": 3}'} <|endoftext|> FUNCTION RESPONSE: ..."""
    assert heldout.call_of(heldout.written(text)) == ("news", {"country": "US", "n": 3})
    assert heldout.judge('{"name": "f", "arguments": {"a": 1}}', """{"name": "f", "arguments": '{"a": 1}'}""")[3]
    assert heldout.call_of("""{"name": "f", "arguments": '{"a": }'}""") is None


NESTED = '{"name": "f", "arguments": {"n": 1, "s": "it\'s"}}'
DEEP = '{"a": ' * 5000 + "1" + "}" * 5000


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        (NESTED, True),
        (f"  {NESTED} <|endoftext|> anything", True),
        ('{\n "name": "f",\n "arguments": {\n  "n": 1,\n  "s": "it\'s"\n }\n}', True),
        ('{"name": "f", "arguments": "{\\"n\\": 1, \\"s\\": \\"it\'s\\"}"}', True),
        ("""{"name": "f", "arguments": '{"n": 1, "s": "it\\'s"}'}""", True),
        ("""{"name": "f", "arguments": '{"n": 1,\n "s": "it's"}'\n}""", True),
        ('{"name": "f", "arguments": {"n": 1.0, "s": "it\'s"}}', True),
        (f"{NESTED}\n{NESTED}", False),
        (f"{NESTED}\nmore", False),
        (f"{NESTED} more", False),
        ("""{"name": "f", "arguments": '{"n": 1, "s": "it\\'s"}'} more""", False),
        ('{"name": "f", "arguments": {"n": 2, "n": 1, "s": "it\'s"}}', False),
        ('{"name": "f", "arguments": "{\\"n\\": 2, \\"n\\": 1, \\"s\\": \\"it\'s\\"}"}', False),
        ('{"name": "g", "name": "f", "arguments": {"n": 1, "s": "it\'s"}}', False),
        ('{"name": "f", "arguments": {"n": true, "s": "it\'s"}}', False),
        (f'{{"name": "f", "arguments": {DEEP}}}', False),
        ("[" * 5000, False),
        (f"[{NESTED}]", False),
        (f"[{NESTED}, {NESTED}]", False),
        ('{"name": "f", "arguments": {"n": 1, "s": "\\u0069t\\u0027s"}}', True),
        ('{"name": "f", "arguments": {"n": 1, "s": "\\ud800"}}', False),
        (NESTED.replace("1", "1e0"), True),
        (f"{NESTED}</functioncall>", True),
        (f"{NESTED}\n</function_call> <|endoftext|>", True),
        (f"{NESTED}</functioncall> more", False),
        (f"{NESTED}</functioncall></functioncall>", False),
        ("""{"name": "f", "arguments": '{"n": 1, "s": "it\\'s"}'}</functioncall>""", True),
        ("""{"name": "f", "arguments": '{"n": 1, "s": "it\\\\'s"}'}""", False),
        ("""{"name": "f", "arguments": '{"n": 1, "s": "it's"} more'}""", False),
        ("""{"name": "f\\x", "arguments": '{"n": 1, "s": "it's"}'}""", False),
        (f"{NESTED},", False),
        (f"```json\n{NESTED}\n```", False),
        (f"""{{"name": "f", "arguments": '{DEEP}'}}""", False),
    ],
)
def test_answer_is_one_call_and_then_ends(given: str, exact: bool) -> None:  # noqa: FBT001 -- a parameter of the test
    """Lines, strings and quotes as they are written; a second call, more text or a doubled key is no right answer."""
    assert heldout.judge(NESTED, heldout.written(given))[3] == exact


def test_rows_without_a_call_count_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    """A call over two lines is read, a broken one counted; of a row without a call, the answer must have none."""
    call = "ASSISTANT: <functioncall> {\n"
    rows = ["USER: a " + call + '"name": "w", "arguments": {}} <|endoftext|>', "USER: b " + call + "broken"]
    rows.append("USER: c ASSISTANT: hi")
    rows += ["no speaker", "USER: " + "d" * 3000 + call + '"name": "w", "arguments": {}}']
    filler = ["USER: x ASSISTANT: y"] * 45
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"chat": text}) for text in filler + rows))
    codec = batches.own_codec(calls.Tokenizer())
    codec = dataclasses.replace(codec, encode=lambda text: list(range(len(text))))
    asked, left_out = heldout.held_out(preset("model", model="m", dataset=str(tmp_path), heldout_rows=5), codec)
    assert [bool(one.answer) for one in asked] == [True, False]
    assert left_out == "left out of the held-out calls: 2 cannot be read, 1 are longer than a row"
    answer = asked[0].answer
    silent = heldout.shares(ALONE, asked, [answer, " hello"])
    assert (silent.prompts, silent.exact, silent.without_call, silent.no_call) == (1, 1.0, 1, 1.0)
    assert heldout.shares(ALONE, asked, [answer, f"<functioncall> {answer}"]).no_call == 0.0
    assert heldout.shares(ALONE, asked, [answer, answer]).no_call == 0.0


def test_rows_of_instructions_have_calls_or_none(tmp_path: Path) -> None:
    """What stands before ``output`` is the prompt, also where it shows how a call is written; the client's row is left out."""
    shown = 'Answer <functioncall> {"name": "x", "arguments": {}}'
    rows = [
        {"instruction": shown, "input": "Oslo?", "output": '<functioncall> {"name": "w", "arguments": {"c": "Oslo"}}'},
        {"instruction": shown, "output": '<function_call>{"name": "w", "arguments": {}}</function_call>'},
        {"instruction": shown, "input": "hi", "output": "hello"},
        {"instruction": "get_weather(city)", "output": "<function_call>get_weather(city='Tokyo')</function_call>"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [{"text": "x"}] * 36 + rows))
    codec = batches.own_codec(calls.Tokenizer())
    codec = dataclasses.replace(codec, encode=lambda text: [text])
    asked, left_out = heldout.held_out(preset("model", model="m", dataset=str(tmp_path)), codec)
    assert [(*one.ids, one.answer) for one in asked] == [
        (f"{shown}\nOslo?\n<functioncall>", '{"name": "w", "arguments": {"c": "Oslo"}}'),
        (f"{shown}\n<function_call>", '{"name": "w", "arguments": {}}</function_call>'),
        (f"{shown}\nhi\n", ""),
    ]
    assert left_out == "left out of the held-out calls: 1 cannot be read"


def test_questions_come_from_the_held_out_rows(tmp_path: Path) -> None:
    """The last tenth of rows with one call each, cut before the call."""
    chat = """USER: weather in {0} ASSISTANT: <functioncall> {{"name": "w", "arguments": '{{"city": "{0}"}}'}} <|endoftext|>"""
    lines = [json.dumps({"chat": chat.format(f"c{number}")}) for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    codec = batches.own_codec(calls.Tokenizer())
    asked, _ = heldout.held_out(preset("model", model="m", dataset=str(tmp_path)), codec)
    assert [heldout.call_of(one.answer) for one in asked] == [("w", {"city": f"c{number}"}) for number in (27, 28, 29)]
    assert codec.decode(asked[0].ids).endswith("<functioncall>")


def test_data_set_without_calls_is_refused(real_model: Path, real_dataset: Path) -> None:
    """Such a data set has no call to generate."""
    config = preset("model", model=str(real_model), dataset=str(real_dataset))
    with pytest.raises(InputError, match="none of its held-out rows has a <functioncall>"):
        heldout.held_out(config, hub.codec_of(config))


class Knows:
    """A model that writes given rows, one after another."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def generate(self, *, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """The prompts, and after each what is to be said, filled up with zeros."""
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        mine, self.rows = self.rows[: len(input_ids)], self.rows[len(input_ids) :]
        width = max(map(len, mine))
        return torch.cat([input_ids, torch.tensor([row + [0] * (width - len(row)) for row in mine])], dim=1)


def test_answers_are_read_up_to_the_end_token() -> None:
    """Tokens after the end are ignored, over more than one batch of prompts. cuDNN would plan its attention for each length."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    config = preset("tiny", heldout_rows=70)
    codec = hub.codec_of(config)
    asked, _ = heldout.held_out(config, codec)
    said = [[*codec.encode(one.answer), codec.end_id, 7, 7] for one in asked]
    given = heldout.answers(Knows(said), asked, codec, torch.device("cpu"))
    assert given == [one.answer for one in asked]
    assert all(all(heldout.judge(one.answer, text)) for one, text in zip(asked, given, strict=True))


def shares(exact: float) -> heldout.Shares:
    """All calls are in JSON, and so many right."""
    return heldout.Shares(prompts=32, json_valid=1.0, name=1.0, arguments=exact, exact=exact)


@pytest.mark.parametrize(
    ("base", "adapter", "detail"),
    [
        (0.0, 0.9, None),
        (0.85, 1.0, None),
        (0.0, 0.89, "89% of 32 generated calls are exact, below 90% (100% are calls in JSON, 100% have the right name, 89%"),
        (0.95, 1.0, "the base alone generates 95% of the calls: these prompts show no learning"),
    ],
)
def test_generation_is_judged(base: float, adapter: float, detail: str | None) -> None:
    """The adapter at 0.9 and above, the base below it."""
    record = exact.Checks(ALONE)
    heldout.record_generation(record, base, shares(adapter))
    found = record.results()["generation"]
    assert found["passed"] == (detail is None)
    assert (detail or f"{adapter:.0%} of 32 generated calls exact; {base:.0%} of those of the base alone") in found["detail"]


def test_a_run_that_learned_nothing_generates_nothing_right() -> None:
    """Though it evaluates by real generation; the base's turn leaves the adapters as they were."""
    settings = {**QUICK, "audit_every": 0, "restore_check": False}
    judged = finetune(preset("tiny", **{**settings, "loss_limit": 0.5}))
    assert judged.checks["generation"]["detail"].startswith("0% of 2 generated calls are exact")
    assert not judged.checks["generation"]["passed"]
    left = finetune(preset("tiny", **settings))
    assert left.left_out["generation"] == "no loss is promised, so no call either"
    assert "generation" not in left.checks
    assert left.adapter_digest == judged.adapter_digest


@pytest.mark.parametrize(("wrong", "passed"), [(0, False), (2, True)])
def test_a_base_that_knows_the_calls_shows_no_learning(wrong: int, *, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would generate follows from one forward: here both rows are right, or neither."""
    monkeypatch.setattr(heldout, "_forward_over", lambda *_: (1.0, 2.0, wrong))
    monkeypatch.setattr(heldout, "score", lambda *_: shares(1.0))
    run = prepared(**{**QUICK, "heldout_rows": 128, "loss_limit": 0.5})
    heldout.generate(run)
    assert run.checks.results()["generation"]["passed"] == passed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick run's checkpoints at 3 and 6, and its adapter in final/."""
    folder = tmp_path_factory.mktemp("trained")
    assert main([*OPTIONS, f"--checkpoint-dir={folder}", "--checkpoint-every=3"]) == 0
    return folder


def scores(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What evaluate prints, and its RESULT."""
    capsys.readouterr()
    assert main(["evaluate", *arguments]) == 0
    out = capsys.readouterr().out
    return out, result(out)


def test_both_kinds_of_directory_give_the_same(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are those of the run, without any on the command line."""
    table, by_checkpoint = scores([f"--checkpoint-dir={trained}"], capsys)
    _, by_peft = scores([f"--adapter={trained / 'final'}"], capsys)
    assert (by_checkpoint["command"], by_checkpoint["step"], by_peft["step"]) == ("evaluate", 6, None)
    assert by_checkpoint["adapter_digest"] == by_peft["adapter_digest"]
    assert by_checkpoint["adapter"] == by_peft["adapter"]
    assert by_checkpoint["base"]["prompts"] == 16
    assert "right arguments" in table
    assert "adapter of step 6" in table


def test_settings_on_the_command_line_win(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line asks for more prompts."""
    assert scores([f"--checkpoint-dir={trained}", "--heldout-rows=20"], capsys)[1]["base"]["prompts"] == 20


def test_damaged_checkpoint_is_passed_over(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged checkpoint is passed over, as in a resume."""
    shutil.copytree(trained, tmp_path / "copy")
    flip_a_bit(next((tmp_path / "copy" / "step-6").glob("*.safetensors")))
    out, found = scores([f"--checkpoint-dir={tmp_path / 'copy'}"], capsys)
    assert found["step"] == 3
    assert "checkpoint step-6 is passed over: damaged" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --adapter DIR or --checkpoint-dir DIR, one of them"),
        (["--adapter=a", "--checkpoint-dir=b"], "one of them"),
        (["--checkpoint-dir={tmp}"], "no complete checkpoint in"),
        (["--adapter={tmp}"], "does not say which base its adapter is for"),
        (["--adapter={tmp}", "--preset=tiny"], "adapter_model.safetensors and adapter_config.json missing"),
        (["--adapter={tmp}/none", "--preset=tiny"], "no such adapter directory"),
        (["--checkpoint-dir={trained}", "--seed=5"], "does not fit this base: it has digest"),
        (["--adapter={trained}/final", "--hidden-size=32"], "does not fit this base: it has digest"),
        (["--checkpoint-dir={trained}", "--lora-rank=4"], "it holds 14 adapter tensors of other names or sizes"),
    ],
)
def test_bad_input_leaves_2_with_one_line(
    arguments: list[str], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input generates nothing."""
    assert main(["evaluate", *(text.format(tmp=tmp_path, trained=trained) for text in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert "generating" not in captured.out


def cut_tensors(folder: Path, cut: slice, names: slice = slice(None)) -> None:
    """Write some of the adapter's tensors again, cut."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 -- slow import

    weights = load_file(folder / export.WEIGHTS)
    save_file({name: weights[name][cut].contiguous() for name in sorted(weights)[names]}, folder / export.WEIGHTS)


def set_rank(folder: Path, rank: object) -> None:
    """Write another rank into the adapter's settings."""
    settings = json.loads((folder / export.ADAPTER).read_text())
    (folder / export.ADAPTER).write_text(json.dumps({**settings, "r": rank}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / export.WEIGHTS).unlink(), "no adapter in .*: adapter_model.safetensors missing"),
        (lambda folder: (folder / export.ADAPTER).unlink(), "no adapter in .*: adapter_config.json missing"),
        (lambda folder: (folder / export.ADAPTER).write_text("{"), "does not describe a plain LoRA adapter"),
        (lambda folder: (folder / export.WEIGHTS).write_bytes(b""), "cannot be loaded onto this base: .*header too small"),
        (lambda folder: os.truncate(folder / export.WEIGHTS, 500), "cannot be loaded onto this base: .*invalid header length"),
        (lambda folder: os.truncate(folder / export.WEIGHTS, 20_000), "cannot be loaded onto this base: .*not fully covered"),
        (lambda folder: cut_tensors(folder, slice(1)), "cannot be loaded onto this base: .*size mismatch for "),
        (lambda folder: cut_tensors(folder, slice(None), slice(2, None)), "misses 2 tensors of the adapter, the first is b"),
        (lambda folder: set_rank(folder, "x"), "cannot be loaded onto this base: "),
        (lambda folder: set_rank(folder, 3), "cannot be loaded onto this base: .*size mismatch for "),
    ],
)
def test_spoiled_adapter_is_one_line_before_anything_is_generated(
    spoil: Callable[[Path], None], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, no share of an adapter of which a part is missing."""
    shutil.copytree(trained / "final", tmp_path / "final")
    spoil(tmp_path / "final")
    assert main(["evaluate", f"--adapter={tmp_path / 'final'}"]) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err)
    assert len(err.splitlines()) == 1
    assert "generating" not in out


@pytest.mark.slow
def test_adapter_calls_functions_and_the_base_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of preset tiny."""
    assert main([f"--checkpoint-dir={tmp_path}"]) == 0
    found = scores([f"--adapter={tmp_path / 'final'}"], capsys)[1]
    assert found["base"]["exact"] == 0
    assert found["adapter"]["json_valid"] >= 0.99
    assert found["adapter"]["exact"] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1234, 1, 2])
def test_tiny_learns_to_call_functions(seed: int) -> None:
    """Loss below 0.5 with margin, at least 90 % of held-out calls exact, and real decoding agrees."""
    outcome = finetune(preset("tiny", seed=seed))
    assert max(outcome.loss, outcome.heldout_loss) < 0.25
    assert outcome.exact_match is not None
    assert outcome.greedy_exact_match is not None
    assert min(outcome.exact_match, outcome.greedy_exact_match) >= 0.9
    assert outcome.step_below_limit is not None
    assert outcome.step_below_limit < 80
    assert outcome.problems() == []

"""The lab's machinery: which claims there are, how they are run, kept and told, and the exit codes.

Claims are written for the occasion here, as files that the lab's processes import like its own.
"""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead.cli import main
from levelhead.errors import LevelheadTypeError, LevelheadValueError
from levelhead.lab import pool, registry, report, result_cache, runner
from levelhead.lab.claim import VERDICTS, Outcome, Task
from levelhead.lab.result import Result, outcome_json
from support import on_every_isa

IDS = [
    *("C1", "C1a", "C2", "C3", "C4", "C5", "C6", "C7", "C7a", "C8", "C8a", "C9", "C9a", "C10"),
    *("C11", "C11a", "C12", "C13", "C13a", "C14", "C15", "C16"),
]
KEYS = [*("id", "claim", "theory", "measured", "stderr", "criterion", "expected", "verdict"), *("params", "seed")]

FOUND = 'Outcome(1.0, params["size"] + 0.5, 0.25, "confirmed", {"series": [1, 2]})'


class Bench:
    """A lab without claims of its own, to be given some."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.modules = registry.MODULES

    def claim(self, id: str, body: str = f"return {FOUND}", **fields: Any) -> None:
        """A claim whose experiment leaves a line in the log and then does as told."""
        given = dict(expected="confirmed", quick={"size": 1}, full={}, alone=False) | fields
        text = f"""
import os, sys, threading, time
import levelhead as lh
from levelhead.lab.claim import Claim, Outcome, UndecidedError

def log(words):
    with open({str(self.log)!r}, "a") as file:
        file.write(f"{id} {{words}}\\n")

def experiment(params, seed, tell):
    log("begins")
{textwrap.indent(textwrap.dedent(body).strip(), "    ")}

CLAIM = Claim(id={id!r}, claim="It is so.", derivation="Because.", criterion="If it is.",
              experiment=experiment, forget=lambda: log("forgets"), **{given!r})
"""
        name = f"occasion_{self.folder.name}_{id}".replace("-", "_")
        (self.folder / f"{name}.py").write_text(text)
        self.modules[id] = name

    @property
    def logged(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def runs(self, id: str) -> int:
        return self.logged.count(f"{id} begins")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "MODULES", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    return Bench(tmp_path)


def one(id: str = "C1", **options: Any) -> Result:
    (result,) = runner.run(id, **options)
    return result


# ---- the registry -----------------------------------------------------------


def test_every_claim_of_the_notes_has_an_id_in_their_order() -> None:
    assert list(registry.MODULES) == IDS


@pytest.mark.parametrize("id", IDS)
def test_a_claim_is_complete(id: str) -> None:
    claim = registry.claim(id)
    assert claim.id == id
    assert claim.claim.endswith(".") and "\n" not in claim.claim
    assert claim.derivation.strip() and claim.criterion.strip()
    assert claim.expected in VERDICTS and claim.expected != "undecided"
    assert claim.full.keys() <= claim.quick.keys()
    assert json.loads(json.dumps(claim.quick)) == claim.quick  # what --set can write


def test_one_file_is_one_claim() -> None:
    folder = Path(lh.lab.__file__).parent / "claims"
    files = {path.stem for path in folder.glob("c*.py")}
    assert files == {name.rsplit(".", 1)[1] for name in registry.MODULES.values()}


def test_ids_are_found_in_any_case_each_once_and_in_order(bench: Bench) -> None:
    for id in ("C1", "C1a", "C2"):
        bench.claim(id)
    assert [claim.id for claim in registry.chosen(["c2", "C1A", "C2"])] == ["C1a", "C2"]
    assert [claim.id for claim in registry.chosen("ALL")] == ["C1", "C1a", "C2"]


@pytest.mark.parametrize(("ids", "given"), [("C99", "'C99'"), (["C1", "x"], "'x'"), ([], "none")])
def test_an_unknown_id_is_told_the_known_ones(ids: Any, given: str) -> None:
    with pytest.raises(LevelheadValueError) as error:
        registry.chosen(ids)
    assert given in str(error.value) and ", ".join(IDS) in str(error.value)


def test_ids_that_are_none_at_all_are_refused() -> None:
    with pytest.raises(LevelheadTypeError, match="ids: expected ids of claims, got a int"):
        registry.chosen(7)  # type: ignore[arg-type]


# ---- results ----------------------------------------------------------------


def test_a_result_has_the_ten_keys_and_keeps_its_details(bench: Bench) -> None:
    bench.claim("C1")
    result = one(seed=3)
    assert list(result.json()) == KEYS
    assert result.json() == dict(
        id="C1",
        claim="It is so.",
        theory=1.0,
        measured=1.5,
        stderr=0.25,
        criterion="If it is.",
        expected="confirmed",
        verdict="confirmed",
        params={"size": 1},
        seed=3,
    )
    assert result.details == {"series": [1, 2]}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("expected", VERDICTS[:3])
def test_what_is_as_expected(bench: Bench, verdict: str, expected: str) -> None:
    bench.claim("C1", f"return Outcome(1, 1, None, {verdict!r})", expected=expected, alone=True)
    assert one().as_expected is (verdict in ("undecided", expected))


def test_json_values_alone() -> None:
    given = {1: (np.float32(0.5), np.arange(2)), "x": [float("nan"), np.inf, -np.inf, True, None]}
    assert outcome_json(Outcome(given, 1, None, "confirmed"))["theory"] == {
        "1": [0.5, [0, 1]],
        "x": [None, "inf", "-inf", True, None],
    }
    with pytest.raises(TypeError, match="JSON cannot hold a set"):
        outcome_json(Outcome({"x": {1}}, 1, None, "confirmed"))


# ---- where experiments run --------------------------------------------------


WHERE = """
return Outcome(None, {"process": os.getpid(), "threads": lh.info().threads,
                      "torch": os.environ["OMP_NUM_THREADS"]}, None, "confirmed")
"""


def test_a_worker_is_another_process_with_one_thread(bench: Bench) -> None:
    bench.claim("C1", WHERE)
    measured = one().measured
    assert measured.pop("process") != os.getpid()
    assert measured == {"threads": 1, "torch": "1"}


def test_a_worker_runs_on_the_instruction_set_of_the_caller(bench: Bench) -> None:
    bench.claim("C1", 'return Outcome(None, lh.info().isa, None, "confirmed")')
    seen = on_every_isa(lambda: one().measured)
    assert [isa for isa, _ in seen] == [measured for _, measured in seen]


def test_torch_has_one_thread_in_a_worker(bench: Bench) -> None:
    body = 'import torch\nreturn Outcome(1, torch.get_num_threads(), None, "confirmed")'
    bench.claim("C1", body)
    assert one().measured == 1


ALONE = 'return Outcome(None, [os.getpid(), lh.info().threads], None, "confirmed")'


def test_who_measures_time_runs_here_and_last_with_every_thread(bench: Bench) -> None:
    bench.claim("C1", ALONE, alone=True)
    bench.claim("C2")
    bench.claim("C3", ALONE, alone=True)
    results = list(runner.run())
    assert [result.id for result in results] == ["C2", "C1", "C3"]
    assert bench.logged == ["C2 begins", "C1 begins", "C3 begins"]
    assert results[1].measured == results[2].measured == [os.getpid(), lh.info().threads]


MEETS = """
for _ in range(400):  # until the other one has begun, too
    if len(open(LOG).readlines()) == 2:
        return Outcome(1, 1, None, "confirmed")
    time.sleep(0.05)
return Outcome(1, 0, None, "refuted")
"""


def test_two_run_side_by_side(bench: Bench) -> None:
    for id in ("C1", "C2"):
        bench.claim(id, MEETS.replace("LOG", repr(str(bench.log))))
    assert [result.verdict for result in runner.run(jobs=2)] == ["confirmed", "confirmed"]


def test_with_one_job_they_run_one_after_the_other(bench: Bench) -> None:
    for id in ("C1", "C2"):
        bench.claim(id, f'time.sleep(0.2)\nlog("ends")\nreturn {FOUND}')
    list(runner.run(jobs=1))
    assert bench.logged == ["C1 begins", "C1 ends", "C2 begins", "C2 ends"]


def test_results_come_in_the_order_of_the_notes(bench: Bench) -> None:
    bench.claim("C1", MEETS.replace("LOG", repr(str(bench.log))))  # ends after C2 has begun
    bench.claim("C2")
    assert [result.id for result in runner.run(["C2", "C1"], jobs=2)] == ["C1", "C2"]


def test_progress_is_told_from_workers_and_from_here(bench: Bench) -> None:
    bench.claim("C1", f'tell(0.5, "halfway")\nreturn {FOUND}')
    bench.claim("C2", f'tell(0.25, "begun")\nreturn {FOUND}', alone=True)
    told: list[tuple[str, float, str]] = []
    list(runner.run(tell=lambda *words: told.append(words)))
    assert told == [("C1", 0.5, "halfway"), ("C2", 0.25, "begun")]


def test_a_script_needs_no_guard_and_no_particular_directory(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (tmp_path / "deep").mkdir()
    script = tmp_path / "deep" / "script.py"
    script.write_text("import levelhead as lh\nprint(next(lh.lab.run('C4', fresh=True)).verdict)\n")
    environment = os.environ | {"LEVELHEAD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("confirmed\n", 0), done.stderr


# ---- when something goes wrong ----------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
def test_an_experiment_that_cannot_decide_says_why(bench: Bench, alone: bool) -> None:
    bench.claim("C1", 'raise UndecidedError("no model here")', alone=alone)
    result = one()
    assert (result.verdict, result.measured) == ("undecided", {"why": "no model here"})
    assert result.as_expected
    one()
    assert bench.runs("C1") == 2  # a model may have been installed meanwhile


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        'raise ZeroDivisionError("of ours")',
        'return Outcome(1, {1, 2}, None, "of ours")',
        'return Outcome(1, {"of ours"}, None, "confirmed")',
    ],
)
def test_a_crash_names_its_claim_and_shows_where(bench: Bench, alone: bool, body: str) -> None:
    bench.claim("C1")
    bench.claim("C2", body, alone=alone)
    with pytest.raises(runner.CrashedError) as error:
        list(runner.run())
    told = str(error.value)
    assert told.startswith("C2: the experiment crashed.\nTraceback")
    assert "of ours" in told or "cannot hold a set" in told


@pytest.mark.parametrize(
    ("body", "code"), [("os._exit(3)", "3"), ("os.kill(os.getpid(), 9)", "-9"), ("sys.exit(5)", "5")]
)
def test_a_process_that_dies_names_its_claim(bench: Bench, body: str, code: str) -> None:
    bench.claim("C1", body)
    with pytest.raises(runner.CrashedError, match=f"C1: its process ended with {code}"):
        list(runner.run())


@pytest.mark.parametrize("alone", [False, True])
def test_a_value_that_a_claim_refuses_is_bad_input(bench: Bench, alone: bool) -> None:
    bench.claim("C1", 'raise lh.LevelheadError("size: expected more")', alone=alone)
    with pytest.raises(LevelheadValueError, match="C1: size: expected more"):
        list(runner.run())


def gone(process: int) -> bool:
    for _ in range(200):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


SLEEPS = 'log(os.getpid())\ntell(0.1, "sleeping")\ntime.sleep(600)'


def test_who_stops_listening_leaves_no_process_behind(bench: Bench) -> None:
    bench.claim("C1", SLEEPS)
    bench.claim("C2", SLEEPS)
    messages = pool.side_by_side([Task(registry.claim(id), {}, 0) for id in ("C1", "C2")], 2)
    assert {next(messages)[0].claim.id, next(messages)[0].claim.id} == {"C1", "C2"}
    messages.close()
    workers = [int(line.split()[1]) for line in bench.logged if "begins" not in line]
    assert len(workers) == 2 and all(gone(worker) for worker in workers)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_lab_ends_its_workers_do_too(bench: Bench, end: signal.Signals) -> None:
    bench.claim("C1", SLEEPS)
    begin = f"import signal, sys; sys.path[:] = {sys.path!r}; from levelhead import cli; "
    begin += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # tests in the background inherit "ignored"
    begin += f"from levelhead.lab import registry; registry.MODULES = {bench.modules!r}; "
    begin += "sys.exit(cli.main(['lab', 'run', 'C1']))"
    lab = subprocess.Popen([sys.executable, "-c", begin], stderr=subprocess.PIPE, text=True)
    while len(bench.logged) < 2:
        assert lab.poll() is None
        time.sleep(0.05)
    lab.send_signal(end)
    _, told = lab.communicate(timeout=240)
    assert gone(int(bench.logged[1].split()[1]))
    if end == signal.SIGINT:
        assert (lab.returncode, told) == (130, "levelhead: interrupted\n")


# ---- the cache --------------------------------------------------------------


def test_a_result_is_measured_once(bench: Bench) -> None:
    bench.claim("C1", f'print("to stdout")\nreturn {FOUND}')
    first, second = one(), one()
    assert bench.runs("C1") == 1
    assert first == second


@pytest.mark.parametrize("changed", [dict(seed=1), dict(params={"size": 2}), dict(full=True), dict(fresh=True)])
def test_what_could_change_a_number_is_measured_again(bench: Bench, changed: Any) -> None:
    bench.claim("C1", full={"size": 64})
    one()
    one(**changed)
    assert bench.runs("C1") == 2


def test_fresh_also_drops_what_the_chosen_experiments_keep(bench: Bench) -> None:
    bench.claim("C1")
    bench.claim("C2")
    one()
    one(fresh=True)
    assert bench.logged == ["C1 begins", "C1 forgets", "C1 begins"]


def test_full_means_the_full_parameters(bench: Bench) -> None:
    bench.claim("C1", quick={"size": 1, "width": 2}, full={"size": 64})
    assert one(full=True).params == {"size": 64, "width": 2}
    assert one().params == {"size": 1, "width": 2}


def test_other_code_is_measured_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.claim("C1")
    one()
    monkeypatch.setattr(result_cache, "_code", lambda isa: "other code")
    one()
    assert bench.runs("C1") == 2


def test_code_is_everything_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "_PACKAGE", tmp_path)
    for file in ("core.so", "lab/claims/c01.py", "cli/lab.py", "page/server.py", "__main__.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("first")
    words = [code("avx2")]
    for file in ("cli/lab.py", "page/server.py", "__main__.py"):  # these only show
        (tmp_path / file).write_text("second")
    assert code("avx2") == words[0]
    for file in ("core.so", "lab/claims/c01.py"):
        (tmp_path / file).write_text("second")
        words.append(code("avx2"))
    words.append(code("baseline"))
    assert len(set(words)) == 4


def code(isa: str) -> str:
    result_cache._code.cache_clear()
    try:
        return result_cache._code(isa)
    finally:
        result_cache._code.cache_clear()


def test_timings_belong_to_a_machine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.claim("C1", alone=True)
    bench.claim("C2")
    list(runner.run())
    monkeypatch.setattr(result_cache, "cpu_name", lambda: "another CPU")
    list(runner.run())
    assert (bench.runs("C1"), bench.runs("C2")) == (2, 1)


def damage_end(text: str) -> str:
    return text[: len(text) // 2]


def damage_digit(text: str) -> str:
    return text.replace('"measured": 1.5', '"measured": 7.5')


@pytest.mark.parametrize("damage", [damage_end, damage_digit, lambda text: ""])
def test_a_damaged_file_is_measured_again(bench: Bench, damage: Callable[[str], str]) -> None:
    bench.claim("C1")
    before = one()
    (file,) = result_cache.directory().iterdir()
    whole = file.read_text()
    assert damage(whole) != whole
    file.write_text(damage(whole))
    assert one() == before
    assert bench.runs("C1") == 2
    assert file.read_text() == whole and list(result_cache.directory().iterdir()) == [file]


def test_a_cache_that_cannot_be_is_told_before_any_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.claim("C1")
    (bench.folder / "file").write_text("")
    monkeypatch.setenv("LEVELHEAD_CACHE", str(bench.folder / "file"))
    with pytest.raises(LevelheadValueError, match="Set LEVELHEAD_CACHE"):
        runner.run("C1")
    assert bench.runs("C1") == 0


# ---- parameters -------------------------------------------------------------

PARAMS = {"size": 1, "rate": 0.5, "rule": "none", "flag": True, "widths": [1, 2], "pairs": [[1.0]]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("size=64", 64),
        ("rate=1e-3", 1e-3),
        ("rate=2", 2.0),
        ("rule=1/sqrt(d_k)", "1/sqrt(d_k)"),
        ('rule="64"', "64"),
        ("flag=false", False),
        ("widths=[]", []),
        ("widths=[7]", [7]),
        ("pairs=[[1, 2.5]]", [[1.0, 2.5]]),
    ],
)
def test_set_changes_a_parameter(bench: Bench, capsys: pytest.CaptureFixture[str], text: str, value: Any) -> None:
    bench.claim("C1", 'return Outcome(1, params, None, "confirmed")', quick=PARAMS)
    assert main(["lab", "run", "C1", "--json", "-", "--set", text]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == found["measured"] == PARAMS | {text.split("=")[0]: value}


def test_set_changes_only_those_that_have_it(bench: Bench) -> None:
    bench.claim("C1", quick={"size": 1, "width": 2})
    bench.claim("C2")
    first, second = runner.run(params={"width": 9})
    assert (first.params["width"], second.params) == (9, {"size": 1})


BAD = [
    (["C99"], "id: expected the id of a claim, got 'C99'"),
    (["C1", "--set", "size"], "--set: expected NAME=VALUE, got 'size'"),
    (["C1", "--set", "=3"], "--set: expected NAME=VALUE, got '=3'"),
    (["C1", "--set", "weight=3"], "set: expected a parameter of a chosen claim, got 'weight'"),
    (["C1", "--set", "size=0.5"], "size: expected a whole number, as in 1, got a number, 0.5"),
    (["C1", "--set", "size=big"], "size: expected a whole number, as in 1, got a word, 'big'"),
    (["C1", "--set", "size=true"], "size: expected a whole number, as in 1, got true or false"),
    (["C1", "--set", "widths=[0.5]"], "widths: expected a whole number, as in 1, got a number"),
    (["C1", "--seed", "-1"], "seed: expected a whole number from 0 to 4294967295, got -1"),
    (["C1", "--jobs", "0"], "jobs: expected a whole number from 1 to 1024, got 0"),
    (["C1", "--json", "no/such/place"], "--json: expected a file in a directory that can be"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD)
def test_bad_input_is_2_and_one_line_before_any_work(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    bench.claim("C1", quick=PARAMS)
    assert main(["lab", "run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and bench.runs("C1") == 0
    assert err.startswith(f"levelhead: {told}") and err.count("\n") == 1


# ---- the command ------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "code"), [("confirmed", 0), ("undecided", 0), ("caveat", 1), ("refuted", 1)])
@pytest.mark.parametrize("json_given", [[], ["--json", "-"]])
def test_the_exit_code_is_1_for_a_verdict_against_expectation(
    bench: Bench, verdict: str, code: int, json_given: list[str]
) -> None:
    bench.claim("C1")
    bench.claim("C2", f"return Outcome(1, 1, None, {verdict!r})")
    for _ in range(2):  # also from the cache
        assert main(["lab", "run", "all", *json_given]) == code


def test_a_crash_is_2_and_shows_where(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.claim("C1", 'raise ZeroDivisionError("of ours")')
    assert main(["lab", "run", "C1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "levelhead: C1: the experiment crashed." in err and "of ours" in err


def test_stdout_has_json_lines_and_nothing_else(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    noisy = f'print("noise")\nos.system("echo noise")\ntell(0.5, "words")\nreturn {FOUND}'
    bench.claim("C1", noisy)
    bench.claim("C2", f'tell(0.5, "words")\nreturn {FOUND}', alone=True)
    assert main(["lab", "run", "all", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert [list(json.loads(line)) for line in out.splitlines()] == [KEYS, KEYS]
    assert err.count("noise") == 2


def test_a_json_file_is_written_beside_the_report(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.claim("C1")
    file = bench.folder / "results.jsonl"
    assert main(["lab", "run", "C1", "--json", str(file)]) == 0
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == one().json()
    out = capsys.readouterr().out
    assert out.startswith("C1   confirmed  as expected\n     It is so.\n")
    assert f"1 claim: no verdict against expectation\nwrote {file}\n" in out


def test_list_and_show(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.claim("C1")
    bench.claim("C2", expected="caveat", full={"size": 64}, alone=True)
    assert main(["lab", "list"]) == 0
    assert capsys.readouterr().out == "C1   confirmed  It is so.\nC2   caveat     It is so.\n"
    assert main(["lab", "show", "c2"]) == 0
    shown = capsys.readouterr().out
    for words in ("It is so.", "Because.", "If it is.", "caveat", "size=1", "size=64", "last"):
        assert words in shown
    assert main(["lab", "show", "C9"]) == 2


def a_result(**fields: Any) -> Result:
    given = dict(
        id="C1",
        claim="It is so.",
        theory=1.0,
        measured=1.5,
        stderr=0.25,
        criterion="If it is.",
        expected="confirmed",
        verdict="confirmed",
        params={},
        seed=0,
    )
    return Result(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(), "  1       1.50 ± 0.25"),
        (dict(measured={"a": 2.0}, stderr={"a": 0.0123}, theory={"a": 2}), "a  2       2.000 ± 0.012"),
        (dict(measured={"a": {"b": 3}}, stderr=None, theory={}), "a, b    3"),
        (dict(measured={"a": 3}, stderr=None, theory={"z": 4}), "z  4"),
        (dict(measured={"a": 3}, stderr=None, theory="all above 2"), "theory: all above 2"),
        (dict(measured={"why": "no model"}, stderr=None, theory=None), "why    no model"),
        (dict(measured=[1.0, 2.0], stderr=[0.1, 0.2], theory=[1, 2]), "[1.00 ± 0.10, 2.00 ± 0.20]"),
        (dict(measured=list(range(9)), stderr=None), "[0, 1, 2, 3, …, 8]"),
        (dict(verdict="refuted"), "C1   refuted    EXPECTED CONFIRMED"),
        (dict(verdict="undecided"), "C1   undecided  expected confirmed"),
    ],
)
def test_numbers_are_told_beside_theory(fields: Any, line: str) -> None:
    lines = list(report.result_lines(a_result(**fields), colour=False))
    assert any(told.strip().endswith(line.strip()) for told in lines), lines
    assert lines[-1] == "" and all(lines[:-1])


# ---- from Python ------------------------------------------------------------


@pytest.mark.parametrize(("module", "examples"), [(lh.lab, 3), (registry, 1), (runner, 1)])
def test_examples_in_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, examples: int) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path))
    assert doctest.testmod(module) == (0, examples)


def test_the_lab_from_python(bench: Bench) -> None:
    bench.claim("C1")
    assert [claim.id for claim in lh.lab.claims()] == ["C1"]
    assert [result.verdict for result in lh.lab.run("C1")] == ["confirmed"]


def test_functions_keep_their_names_although_modules_have_them_too() -> None:
    check = """
import levelhead as lh
import levelhead.lab.claims.c04_softmax
from levelhead.lab.claims import c01_variance
from levelhead.lab.figure import Figure
assert callable(lh.lab.claims) and callable(lh.lab.figure)
"""
    subprocess.run([sys.executable, "-c", check], check=True)


def test_input_is_checked_before_anything_is_asked_for() -> None:
    with pytest.raises(LevelheadValueError):
        lh.lab.run("C1", seed=-1)

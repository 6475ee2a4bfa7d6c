"""A program's own checks of values that are not known: they pass, since on the GPU they would."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from flopmeter.run.script import Script, run
from flopmeter.run.session import ScriptSession, Wishes

LONG = f"""
import torch
high = torch.randn(8, device="cuda").max()
if bool(high < -9):
    steps = [{"high, " * 300}]
    print("what goes on is long")
else:
    raise ValueError
"""
PICKLES = """
import copy, io, pickle, torch, yaml
loss = torch.randn(8, device="cuda").max().item()
pickled = pickle.dumps({"loss": loss})
plain = pickle.loads(pickled)
print(yaml.safe_dump({"loss": loss}).strip(), yaml.dump({"loss": loss}).strip())
print(plain, b"flopmeter" in pickled, type(plain["loss"]).__name__, copy.deepcopy([loss])[0] is loss)
"""
PROGRAM = Path(__file__).parent / "programs" / "own_checks.py"


def error_and_output(folder: Path, text: str) -> tuple[BaseException | None, str]:
    """How a script with this text ends, and what it prints."""
    program, session, out = folder / "script.py", ScriptSession("a100-sxm4-80gb", Wishes()), io.StringIO()
    program.write_text(text)
    with session.open(), contextlib.redirect_stdout(out):
        ending = run(Script(str(program)), session)
    return ending.error, out.getvalue()


def test_the_branch_that_raises_may_be_far_away(tmp_path):
    """An instruction has one byte for how far it jumps; more of them stand in one of their own before it."""
    assert error_and_output(tmp_path, LONG) == (None, "what goes on is long\n")


def test_checks_of_unknown_values_pass_and_those_of_known_ones_are_made():
    session, out, err = ScriptSession("a100-sxm4-80gb", Wishes()), io.StringIO(), io.StringIO()
    with session.open(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ending = run(Script(str(PROGRAM)), session)
        uses = session.meter.assumed
        first_lines = str(session.report("own_checks.py"))
    assert out.getvalue().splitlines() == [
        "a case that goes on",
        "a later case that goes on",
        "what was caught is passed over",
        "turns of a loop 0",
        "between unknown values False False",
        *3 * ["as a number that was read True"],
        "known False True",
    ]
    assert str(ending.error) == "known values are compared as they are", err.getvalue()
    assert {
        "an unknown condition is such that the program raises no error: True",
        "an unknown condition is such that the program raises no error: False",
        "an unknown condition holds, as it does for a stand-in 1.0",
        "an unknown condition does not hold",
    } <= {use.rule for use in uses}
    assert "own_checks.py:45 goes on while an unknown condition holds, and was ended where it first" in first_lines


def test_a_number_that_stands_in_is_a_plain_one_where_it_is_saved_and_itself_where_it_is_copied(tmp_path):
    """torch.package takes classes of the program and of torch, and weights_only plain numbers."""
    saved = "loss: 1.0 loss: 1.0\n{'loss': 1.0} False float True\n"
    assert error_and_output(tmp_path, PICKLES) == (None, saved)

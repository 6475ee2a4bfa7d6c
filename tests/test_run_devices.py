"""`flopmeter run --hardware A,B script.py`: one unmodified script on several devices."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
name = torch.cuda.get_device_name()
print("on", name)
if "L4" in name and "--fails-on-l4" in sys.argv:
    raise RuntimeError("no L4, please")
layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(5):
    layer(torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def flopmeter(*words):
    command = [sys.executable, "-m", "flopmeter", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_each_device_has_the_row_of_a_run_of_its_own_and_what_the_script_writes_is_shown_once(script):
    done = flopmeter("--hardware", "l4,h100-sxm5-80gb", "--price", "l4=0.8", "--format", "json", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("on NVIDIA L4\n")
    assert done.stdout.count("on ") == 1
    fast, slow = json.loads(done.stderr)["rows"]
    assert (fast["hardware"], slow["hardware"]) == ("h100-sxm5-80gb", "l4")
    assert slow["dollars_per_step"] == pytest.approx(0.8 * slow["seconds"] / 3600)
    alone = flopmeter("--hardware", "l4", "--format", "json", script)
    assert slow["seconds"] == pytest.approx(json.loads(alone.stderr)["run"]["step_seconds"][-1])


def test_one_device_has_a_row_for_each_op_and_a_timeline_if_asked(script, tmp_path):
    path = tmp_path / "step.json"
    done = flopmeter("--hardware", "l4", "--by", "op", "--trace", path, script)
    assert done.returncode == 0, done.stderr
    of_products = next(line.split() for line in done.stderr.splitlines() if line.startswith(("mm ", "addmm ")))
    events = json.loads(path.read_text())["traceEvents"]
    products = [event for event in events if event.get("cat") == "kernel" and event["name"] == of_products[0]]
    assert len(products) == int(of_products[1])


def test_a_device_on_which_the_script_fails_is_left_out_with_its_error(script):
    done = flopmeter("--hardware", "h100-sxm5-80gb,l4", script, "--fails-on-l4")
    assert done.returncode == 0
    assert "left out: on l4 train.py ends with RuntimeError: no L4, please" in done.stderr
    assert "Traceback" not in done.stderr
    assert "h100-sxm5-80gb" in done.stderr


def test_the_price_is_that_of_all_ranks(script):
    words = ("--hardware", "l4,l40s", "--price", "l4=0.5", "--kwh", "0.36", "--gpus", "2", "--format", "json")
    done = flopmeter(*words, "--", "torchrun", "--nproc-per-node", "2", script)
    row = next(row for row in json.loads(done.stderr)["rows"] if row["hardware"] == "l4")
    assert row["dollars_per_hour"] == 1.0
    assert row["energy_dollars"] == pytest.approx(2 * row["joules"] * 0.36 / 3.6e6)


def test_the_energy_of_a_step_costs_its_kilowatt_hours_on_one_device_and_on_several(script):
    price = 0.3 / 3.6e6  # dollars a joule
    done = flopmeter("--hardware", "l4,h100-sxm5-80gb", "--kwh", "0.3", "--format", "json", script)
    for row in json.loads(done.stderr)["rows"]:
        assert row["energy_dollars"] == pytest.approx(price * row["joules"])
    alone = flopmeter("--hardware", "l4", "--kwh", "0.3", "--format", "json", script)
    totals = json.loads(alone.stderr)["totals"]
    assert totals["energy_dollars"] == pytest.approx(price * totals["joules"])

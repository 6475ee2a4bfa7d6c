"""What `flopmeter run` does where data is missing, where a program has no optimizer, and with parameters made late."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flopmeter
from flopmeter.cli import main
from flopmeter.run.session import ScriptSession, Wishes
from flopmeter.run.synthetic import sample_of
from flopmeter.torch_names.private import dispatch_modes

A100 = "a100-sxm4-80gb"
READS_FILES = """
import torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __init__(self, folder):
        self.files = open(folder + "/list.txt").read().split()
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        return torch.zeros(3, 8, 8), index

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, labels in DataLoader(Images("nowhere"), batch_size=16):
    torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
    print(tuple(images.shape), labels.dtype, int(labels.max()) < 10)
"""
READS_AN_ARRAY = """
import torch
class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.data = open("nowhere").read()
    def __getitem__(self, index): ...
print(Images().data)
"""
MAPS_TOKENS = """
import numpy, torch
data = numpy.memmap("train.bin", dtype=numpy.uint16, mode="r")
model = torch.nn.Embedding(100, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.from_numpy(data[:64].astype(numpy.int64)).cuda()).sum().backward()
    optimizer.step()
"""


FINDS_FILES = """
import glob, torch
class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.files = glob.glob("nowhere/*.png")
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index): ...
for x, y in torch.utils.data.DataLoader(Images(), batch_size=16, shuffle=True):
    print(tuple(x.shape), y.dtype)
    torch.nn.Linear(64, 10).cuda()(x.cuda().view(-1, 64))
    break
"""


OPENS_FILES = FINDS_FILES.replace(
    'glob.glob("nowhere/*.png")', '[f"nowhere/{number}.png" for number in range(100)]'
).replace("index): ...", "index): return open(self.files[index]).read(), 0")


def test_samples_stand_in_for_files_that_a_data_set_opens_one_by_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OPENS_FILES)
    assert main(["run", "--synthetic", "1x8x8,:10", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("(16, 1, 8, 8) torch.int64\n")
    assert err.count("synthetic samples 1x8x8,:10 stand in for Images (FileNotFoundError") == 1


def test_samples_stand_in_for_a_data_set_that_found_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FINDS_FILES)
    assert main(["run", "train.py"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("the data set is empty: the script needs its data, or --synthetic")
    assert main(["run", "--synthetic", "1x8x8,:10", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("(16, 1, 8, 8) torch.int64\n")
    assert "synthetic samples 1x8x8,:10 stand in for Images, which is empty" in err


def test_a_data_set_that_cannot_be_made_gives_samples_of_the_stated_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(READS_FILES)
    assert main(["run", "train.py"]) == 1
    assert "--synthetic for data sets" in capsys.readouterr().err
    assert main(["run", "--synthetic", "3x8x8,:10", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out == "(16, 3, 8, 8) torch.int64 True\n" * 2
    assert "synthetic samples 3x8x8,:10 stand in for Images (FileNotFoundError" in err
    assert "flopmeter" not in str(Dataset.__init_subclass__)


@pytest.mark.parametrize("take", ["np.concatenate([np.load(each) for each in files])", "np.load(sorted(files)[0])"])
def test_a_data_set_that_joins_or_takes_the_files_that_it_found_cannot_be_made_of_none(
    take, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    made = f"import glob, numpy as np; files = glob.glob('nowhere/*.npy'); self.images = {take}"
    (tmp_path / "train.py").write_text(
        READS_FILES.replace('self.files = open(folder + "/list.txt").read().split()', made)
    )
    assert main(["run", "train.py"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("its data set cannot be made of what is here: the script needs its data, or --synthetic")
    assert main(["run", "--synthetic", "3x8x8,:10", "train.py"]) == 0
    assert "synthetic samples 3x8x8,:10 stand in for Images" in capsys.readouterr().err


def test_arguments_of_a_data_set_may_have_any_name():
    class Images(Dataset):
        def __init__(self, data, original):
            self.images = torch.load(data / original)

        def __len__(self):
            return len(self.images)

        def __getitem__(self, index):
            return self.images[index]

    with flopmeter.cuda(A100, wishes=Wishes(synthetic="3x8x8,:10")):
        image, _ = Images(data=Path("nowhere"), original="images.pt")[0]
    assert image.shape == (3, 8, 8)


def test_a_data_set_that_asserts_its_files_cannot_be_made_either():
    class Asserts(Dataset):
        def __init__(self):
            assert Path("nowhere").is_dir(), "no such folder"

        def __len__(self):
            return 0

        def __getitem__(self, index):
            raise IndexError

    with flopmeter.cuda(A100, wishes=Wishes(synthetic="4,:10")) as device:
        (batch, _) = next(iter(DataLoader(Asserts(), batch_size=8)))
        batch.to(device).sin()
    assert batch.shape == (8, 4)
    assert any("stand in for Asserts (AssertionError: no such folder)" in note for note in device.report().step.notes)


def test_what_a_program_asks_an_absent_data_set_for_beside_samples_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(READS_AN_ARRAY)
    assert main(["run", "--synthetic", "3x8x8,:10", "train.py"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("Images is not here, and the samples of --synthetic have no 'data': the script needs its data")


def test_an_array_in_a_file_that_is_not_there_is_of_zeros(tmp_path, monkeypatch, capsys):
    pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(MAPS_TOKENS)
    assert main(["run", "--synthetic", "64:100", "train.py"]) == 0
    assert "stand in for train.bin" in capsys.readouterr().err


HAS_A_FOLDER_OF_DATASETS = """
from datasets import Images
print(Images.__module__)
"""
LOADS_FROM_THE_HUB = """
from datasets import load_dataset
import torch
print(load_dataset("someone/something", split="train"))
torch.nn.Linear(4, 4).cuda()(torch.zeros(4, 4).cuda())
"""
COUNTS_CLASSES = """
from datasets import load_dataset
import torch
data = load_dataset("someone/something", "part")["train"]
print(data.features["label"].num_classes, data[0]["label"])
print(getattr(data.features["ids"], "names", None))
torch.nn.Linear(4, 4).cuda()(torch.zeros(4, 4).cuda())
"""
OPENS_IMAGES = """
from datasets import load_dataset
import torch
data = load_dataset("someone/something")["train"]
image = data[4095]["image"].convert("RGB")
print(len(data), image.size, image.mode)
torch.nn.Linear(4, 4).cuda()(torch.zeros(4, 4).cuda())
"""
PACKAGE_OF_THE_HUB = """
from types import SimpleNamespace

class Dataset:
    info = SimpleNamespace(description="")
    from_dict = classmethod(lambda kind, columns: kind(columns, 0))

    def __init__(self, columns, length):
        self.columns, self.length = columns, length

    def __len__(self):
        return self.length

    def select(self, places):
        return Dataset(self.columns, len(places))

    def __repr__(self):
        return f"{self.length} rows of {self.columns}"

def load_dataset(path, split=None, streaming=False):
    raise ConnectionError(path)
"""


def ran_beside(folder: Path, text: str, package: str) -> subprocess.CompletedProcess[str]:
    """A script beside which there is a package `datasets`, in a process that has imported none."""
    (folder / "datasets").mkdir()
    (folder / "datasets" / "__init__.py").write_text(package)
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "flopmeter", "run", "--synthetic", "text=100:text", str(folder / "train.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_script_may_have_a_folder_that_is_called_as_the_package_of_the_hub(tmp_path):
    ran = ran_beside(tmp_path, HAS_A_FOLDER_OF_DATASETS, "class Images: ...")
    assert ran.stdout == "datasets\n", ran.stderr
    assert "ran no op on the device" in ran.stderr  # which is all that is wrong with it


def test_a_table_of_the_hub_that_is_not_there_has_the_named_columns_and_one_row_many_times(tmp_path):
    ran = ran_beside(tmp_path, LOADS_FROM_THE_HUB, PACKAGE_OF_THE_HUB)
    row = {"text": [" ".join(100 * ["word"])]}
    assert (ran.stdout, ran.returncode) == (f"4096 rows of {row}\n", 0), ran.stderr
    assert "synthetic samples text=100:text stand in for someone/something (ConnectionError" in ran.stderr


def test_an_integer_of_a_table_of_the_hub_has_names_of_classes_which_programs_count(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(COUNTS_CLASSES)
    assert main(["run", "--synthetic", "text=4:text,label=:3,ids=2:9", "train.py"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == "3 0\nNone\n"


def test_a_table_of_the_hub_may_have_images_as_programs_transform_them(tmp_path, monkeypatch, capsys):
    """Many megabytes, were each row a copy."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OPENS_IMAGES)
    assert main(["run", "--synthetic", "image=512x768:image,label=:3", "train.py"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == "4096 (768, 512) RGB\n"


@pytest.mark.parametrize("of", ["[{}, {}]", "({}, {})"])
def test_each_split_of_a_list_is_a_table(tmp_path, of):
    """As load_dataset gives them: `split=["train[:5%]", "test"]`."""
    splits = of.format('"train[:5%]"', '"test"')
    ran = ran_beside(tmp_path, LOADS_FROM_THE_HUB.replace('split="train"', f"split={splits}"), PACKAGE_OF_THE_HUB)
    table = f"4096 rows of { {'text': [' '.join(100 * ['word'])]} }"
    assert ran.stdout == of.format(table, table) + "\n", ran.stderr


KNOWS_ITS_LENGTH = """
from datasets import load_dataset
import torch

data = load_dataset("someone/something", split="train")
parts = data.shuffle(seed=0).map(lambda row: {"again": row["text"]}).train_test_split(test_size=10_000)
streamed = load_dataset("someone/something", split="train", streaming=True)
rows = {
    "the first": data.select(range(10_000)),
    "those from a number on": data.select(range(100_000, len(data))),
    "some between": data.select(range(100_000, 100_064)),
    "as a list": data.select([5, 70_000]),
    "few": data.select(range(32)),
    "none": data.select([]),
    "train": parts["train"],
    "test": parts["test"],
    "a hundredth": data.train_test_split(test_size=0.01)["test"],
    "streamed": list(streamed.skip(50_000).take(8)),
}
for name, found in rows.items():
    assert all(row["text"] == "word word" for row in list(found)[:2])
    print(name, len(found))
torch.nn.Linear(4, 4).cuda()(torch.zeros(4, 4).cuda())
"""


def test_a_program_that_knows_how_long_a_table_of_the_hub_is_gets_rows_though_there_are_fewer(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(KNOWS_ITS_LENGTH)
    assert main(["run", "--synthetic", "text=2:text", "train.py"]) == 0, capsys.readouterr().err
    printed = dict(line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name: int(count) for name, count in printed.items()} == {
        "the first": 4096,
        "those from a number on": 4096,
        "some between": 64,
        "as a list": 2,
        "few": 32,
        "none": 0,
        "train": 2048,
        "test": 2048,
        "a hundredth": 41,
        "streamed": 8,
    }


def test_tables_that_are_there_keep_their_own_bounds(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("""
import torch
from datasets import Dataset
data = Dataset.from_dict({"text": ["a", "b"]})
try:
    data.select(range(3))
except IndexError as error:
    print(error)
torch.nn.Linear(4, 4).cuda()(torch.zeros(4, 4).cuda())
""")
    assert main(["run", "--synthetic", "text=2:text", "train.py"]) == 0, capsys.readouterr().err
    assert "out of range" in capsys.readouterr().out


class Counting(Dataset):
    """Ten samples, which are counted."""

    read = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        Counting.read += 1
        return torch.full((4,), index)


def test_the_first_sample_may_stand_for_all_and_the_class_is_its_own_again_behind():
    before = Counting.__getitem__
    with flopmeter.cuda(A100, wishes=Wishes(synthetic="first")) as device:
        batches = [batch for batch, _ in zip(DataLoader(Counting(), batch_size=8), range(5), strict=False)]
        assert all(torch.equal(batch, torch.zeros(8, 4, dtype=batch.dtype)) for batch in batches)
        batches[0].cuda()
    assert Counting.read == 1
    assert "the first sample of Counting stands for all of its samples" in device.report().step.notes
    assert len(Counting()) == 10
    assert Counting.__getitem__ is before


def test_samples_are_tuples_or_dictionaries_of_tensors_integers_words_and_images():
    image, label = sample_of("3x4x4:float16,:10").value()
    assert (image.shape, image.dtype, label) == ((3, 4, 4), torch.float16, 0)
    pytest.importorskip("PIL")
    assert sample_of("4x6:image").value().size == (6, 4)  # width and height
    modes = {"4x6:image": "RGB", "1x4x6:image": "L", "3x4x6:image": "RGB", "4x4x6:image": "RGBA"}
    assert {text: sample_of(text).value().mode for text in modes} == modes
    assert sample_of("1x4x6:image").value().size == (6, 4)
    named = sample_of("ids=8:5,text=3:text").value()
    assert named["ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert named["text"] == "word word word"
    assert sample_of("7").value().shape == (7,)


def test_fields_in_parentheses_are_one_part_of_a_sample():
    (left, right), label = sample_of("(3x4x4, 3x2x2),:10").value()
    assert (left.shape, right.shape, label) == ((3, 4, 4), (3, 2, 2), 0)
    named = sample_of("views=(big=3x4,small=2),label=:10").value()
    assert {name: each.shape for name, each in named["views"].items()} == {"big": (3, 4), "small": (2,)}
    assert named["label"] == 0


@pytest.mark.parametrize("text", ["", "3x", "3:nothing", "a=3,4", "x", "3,,4", "-1", "(3", "3),4", "()", "(a=3,4)"])
def test_a_sample_that_cannot_be_read_is_one_line(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["run", f"--synthetic={text}", "train.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"flopmeter: --synthetic {text}".rstrip())
    assert err.count("\n") == 1


def test_a_program_that_updates_its_weights_by_itself_stops_after_its_steps():
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Linear(64, 64, bias=False).cuda()
        with torch.no_grad():
            model(torch.zeros(100, 64, device="cuda"))  # an evaluation before
        for batch in (8, 16, 32, 64, 128):
            model.zero_grad()
            for part in torch.zeros(batch, 64, device="cuda").chunk(2):
                nn.functional.mse_loss(model(part), part)  # looks twice, learns once
            model(part).sum().backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
        raise AssertionError("it did not stop")
    report = device.report()
    assert report.parts.count == 3
    assert report.parts.marked_by == "calls of Linear, trained without an optimizer"
    assert (
        report.step.macs == (16 + 16 + 16 + 16) * 64 * 64
    )  # both halves, one of them again, and the gradient of the weight


def test_a_program_that_wants_gradients_of_its_inputs_is_not_said_to_train():
    """As integrated gradients do; the batch norm's averages move, and the weights stay."""
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
        for _ in range(40):
            x = torch.zeros(8, 64, device="cuda", requires_grad=True)
            model(x).sum().backward()
            x.grad.abs_()
    assert device.report().parts.marked_by == "calls of Sequential, with backward passes and no optimizer"


def test_a_layer_that_is_called_to_build_the_model_marks_no_step():
    """As Keras does, which calls each layer once for its shapes, and updates weights by itself."""
    with flopmeter.cuda("h100-sxm5-80gb", steps=3) as device:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10)).cuda()
        x = torch.zeros(4, 3, 8, 8, device=device)
        model[2](model[1](model[0](x)))
        for _ in range(5):
            model(x).sum().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= weight.grad
    report = device.report()
    assert report.headline.endswith("the last of 3 (marked by calls of Sequential, trained without an optimizer)")
    convolution, product = 4 * 36 * 8 * 27, 4 * 8 * 36 * 10
    assert report.step.macs == 2 * convolution + 3 * product  # nobody asks for the gradient of x


def test_layers_whose_shape_the_first_batch_tells_move_train_and_keep_their_identity():
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Sequential(nn.LazyLinear(8, bias=False), nn.ReLU(), nn.LazyLinear(4, bias=False)).cuda()
        weight = model[0].weight
        assert "LazyLinear" in repr(model)
        model(torch.zeros(2, 16, device="cuda"))
        assert model[0].weight is weight
        assert weight.shape == (8, 16)
        assert weight.is_cuda
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.zeros(2, 16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert device.report().step.macs == 2 * (2 * 8 * 16) + 3 * (2 * 4 * 8)


def test_lazy_layers_may_meet_their_first_batch_inside_of_a_meter():
    with torch.device("meta"):
        model, x = nn.LazyLinear(8, bias=False), torch.empty(2, 16)
    with flopmeter.FlopMeter(A100) as meter:
        model(x)
    assert meter.report().macs == 2 * 8 * 16


def test_an_index_alone_is_a_device_of_cuda_and_devices_stay_those_of_torch():
    true, one = torch.device, torch.device("cpu")
    with flopmeter.cuda(A100):
        assert torch.device(0) == torch.device("cuda", 0)
        assert torch.zeros(1).to(torch.device(0)).is_cuda
        assert isinstance(one, torch.device)
        assert not isinstance("cpu", torch.device)
        assert isinstance(torch.device("cuda"), true)
        assert type(one) == torch.device  # noqa: E721 - as programs ask
        assert {true: 1}[torch.device] == 1
        assert pickle.loads(pickle.dumps(torch.device(0))) == true("cuda", 0)
    assert torch.device is true


def _modes(queue) -> None:
    queue.put((dispatch_modes(), (torch.ones(3) + 1).sum().item()))


def test_a_process_that_the_program_forks_is_not_metered():
    context = multiprocessing.get_context("fork")
    with flopmeter.cuda(A100) as device:
        queue = context.Queue()
        process = context.Process(target=_modes, args=(queue,))
        process.start()
        assert queue.get(timeout=60) == (0, 6.0)
        process.join()
        torch.ones(1, device="cuda")
    assert device.report().step.flops == 0


def test_a_part_of_an_unknown_mask_has_the_fraction_of_the_whole():
    with flopmeter.cuda(A100, wishes=Wishes(mask_fraction=0.5)):
        x = torch.randn(4, 100, 8, device="cuda")
        mask = x[..., 0] > 0
        assert sum(len(x[image][mask[image]]) for image in range(4)) == 200


def test_a_batch_that_a_thread_pins_waits_until_the_compiler_has_traced():
    """DataLoader(pin_memory=True) pins batches in a thread of its own."""
    from torch.utils.data._utils import pin_memory

    pinned: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: pinned.extend(pin_memory.pin_memory([torch.zeros(4)])))
    session = ScriptSession(A100, Wishes())
    with session.open():
        with session.meter.around_tracing():
            thread.start()
            thread.join(0.2)
            assert not pinned
        thread.join(60)
        assert [batch.is_pinned() for batch in pinned] == [True]


class Doubled(Dataset):
    """Each sample takes the host an op."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(64).mul(2)


@pytest.mark.parametrize("pins", [False, True])
def test_a_batch_is_a_batch_whether_it_is_pinned_or_not(pins):
    """Processes of the loader could make it in either case."""
    with flopmeter.cuda(A100) as device:
        net = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in DataLoader(Doubled(), batch_size=64, pin_memory=pins):
            net(batch.cuda(non_blocking=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (told,) = [each for each in device.report().step.advice if "on tensors of its own" in each.what]
    assert told.remedy.startswith("DataLoader(num_workers")


class Made(Dataset):
    """64 numbers a sample, which are made beforehand."""

    def __init__(self) -> None:
        self.data = torch.zeros(32_768, 64)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


def test_batches_that_workers_hand_over_are_no_work_of_the_host_and_grow_as_they_do():
    """A larger batch is told the time that it takes when it is run."""

    def step(batch_size):
        with flopmeter.cuda(A100) as device:
            net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for batch in DataLoader(Made(), batch_size=batch_size, num_workers=1):
                net(batch.cuda()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return device.report().step

    small = step(64)
    assert not [each.what for each in small.advice if "on tensors of its own" in each.what]
    (told,) = (each for each in small.advice if "times the batch" in each.remedy)
    times = int(told.remedy.split()[0])
    larger = step(64 * times)
    assert (small.seconds - told.gain_seconds) * times == pytest.approx(larger.seconds, rel=0.05)


def test_memory_may_be_asked_for_pinned():
    with flopmeter.cuda(A100):
        assert torch.empty(4, pin_memory=True).is_pinned()
        assert torch.empty(4, pin_memory=True).to("cuda", non_blocking=True).is_cuda
        assert not torch.empty(4).is_pinned()


def test_a_program_may_split_a_data_set_that_is_not_there_by_the_length_that_it_knows():
    with flopmeter.cuda(A100, wishes=Wishes(synthetic="4,:10")):

        class Missing(Dataset):
            def __init__(self) -> None:
                raise FileNotFoundError

            def __len__(self) -> int:
                raise AssertionError

            def __getitem__(self, index: int) -> None: ...

        train, test = torch.utils.data.random_split(Missing(), [900, 100])
        assert (len(train), len(test)) == (900, 100)
        assert train[0][0].shape == (4,)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_not_forked_do_not_make_synthetic_batches(persistent):
    with flopmeter.cuda(A100, wishes=Wishes(synthetic="first")):
        spawned = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": persistent}
        loader = DataLoader(Counting(), batch_size=8, timeout=5, **spawned)
        for _ in range(2):
            assert next(iter(loader)).shape == (8, 4)
        assert (loader.num_workers, loader.timeout) == (2, 5)
    assert Counting.read > 0


def test_weights_that_cannot_be_downloaded_leave_those_that_the_model_was_made_with(tmp_path):
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(8, 4)
        made = model.weight.clone()
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        for _ in range(2):
            weights = torch.hub.load_state_dict_from_url("file:///nowhere/net-1.pth", model_dir=str(tmp_path))
            assert "weight" not in weights
            model.load_state_dict(weights["model"])
            model.load_state_dict(dict(weights))
        assert torch.equal(model.weight, made)
        model.cuda()(torch.zeros(2, 8, device="cuda"))
    (note,) = (note for note in device.report().step.notes if "net-1.pth" in note)
    assert "keeps the weights that it was made with" in note


def test_a_font_that_cannot_be_downloaded_is_not_said_to_be_weights(tmp_path):
    """As YOLO asks for the font of its figures."""
    with flopmeter.cuda(A100) as device:
        torch.hub.download_url_to_file("file:///nowhere/Arial.ttf", str(tmp_path / "Arial.ttf"))
        nn.Linear(8, 4, device="cuda")(torch.zeros(2, 8, device="cuda"))
    (note,) = (note for note in device.report().step.notes if "Arial.ttf" in note)
    assert note.endswith(": the program goes on without it")


GOES_ON_FROM_A_CHECKPOINT = """
import torch

model = torch.nn.Linear(8, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = torch.load("nowhere/last.ckpt", map_location="cpu")
model.load_state_dict({name.removeprefix("module."): weight for name, weight in checkpoint["model"].items()})
optimizer.load_state_dict(checkpoint["optimizer"])
model.cuda()
for epoch in range(checkpoint["epoch"], 3):
    model(torch.zeros(2, 8).cuda()).sum().backward()
    optimizer.step()
    print(epoch)
"""


def test_an_empty_file_stands_for_weights_where_a_script_looks_for_the_file_by_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    looks = "assert __import__('pathlib').Path('nowhere/last.ckpt').is_file()\n"
    (tmp_path / "train.py").write_text(looks + GOES_ON_FROM_A_CHECKPOINT)
    assert main(["run", "--without-weights", "train.py"]) == 1
    assert "an empty file of that name may do" in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "last.ckpt").touch()
    assert main(["run", "--without-weights", "train.py"]) == 0
    assert "nowhere/last.ckpt is empty: its model keeps the weights that it was made" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_here_is_one_line_or_leaves_the_model_as_it_was_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(GOES_ON_FROM_A_CHECKPOINT)
    assert main(["run", "train.py"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("last.ckpt is not here; if it is weights, --without-weights leaves the model as it was made")
    assert main(["run", "--without-weights", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out == "0\n1\n"  # the third step ends the run
    assert "nowhere/last.ckpt is not here (FileNotFoundError): its model keeps the weights that it was made" in err


BUILT_ON_META = """
import torch

with torch.device("meta"):
    model = torch.nn.Linear(1024, 1024)
model.load_state_dict(torch.load("weights.pt", map_location=WHERE), assign=True)
assert model.weight.device.type == WHERE, model.weight.device
model.cuda()
print(torch.cuda.memory_allocated())
model(torch.zeros(1, 1024).cuda())
"""


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_weights_that_are_not_here_take_the_place_of_those_on_meta(where, tmp_path, monkeypatch, capsys):
    """As Wan and Flux load theirs: the model is made on the device meta, and a file's tensors are put into it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infer.py").write_text(BUILT_ON_META.replace("WHERE", repr(where)))
    assert main(["run", "--without-weights", "infer.py"]) == 0
    assert int(capsys.readouterr().out) == 4 * (1024 * 1024 + 1024)


def test_results_that_the_host_cuts_and_averages_are_told_to_be_done_on_the_device():
    """As a script that saves what a model of proteins makes of each sequence: none of it can be made once."""
    sequences = 200
    with flopmeter.cuda(A100, steps=3) as device:
        model = torch.nn.Linear(64, 64, device="cuda").eval()
        with torch.no_grad():
            for _ in range(3):
                results = model(torch.zeros(sequences, 128, 64, device="cuda")).cpu()
                for each in results:
                    each[1:100].mean(0)
    (told,) = [each for each in device.report().step.advice if "on tensors of its own" in each.what]
    assert told.remedy == "done on the device, before the results come to the host, or in another process"

"""Targets of the command line: which model a name stands for, and what running it means."""

import json
import sys
import textwrap
import types
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.cli.targets import Programs, TargetError, load_target
from flopmeter.cli.training import optimizer_choice
from flopmeter.models import BUILTINS
from flopmeter.models import hubs as model_hubs

SMALL = """
    import torch
    from torch import nn

    def build(batch=2, seq=16, dtype=torch.float32):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)
        return model, torch.zeros(batch, seq, 8, dtype=dtype)
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def report_of(program, hardware="a100-sxm4-80gb"):
    with FlopMeter(hardware) as meter:
        program.run()
    return meter.report()


def macs_of_small(rows):
    return rows * (8 * 32 + 32 * 4)


def test_a_function_of_a_file_is_called_with_the_options_that_its_signature_names(write):
    target = load_target(f"{write(SMALL)}:build")
    assert target.accepts == ("batch", "seq", "dtype")
    assert report_of(target.program()).macs == macs_of_small(2 * 16)
    report = report_of(target.program(batch=3, seq=5, dtype=torch.bfloat16))
    assert report.macs == macs_of_small(3 * 5)
    assert report.main_dtype == "bf16"


def test_an_option_that_the_target_does_not_take_is_refused(write):
    with pytest.raises(TargetError, match="takes no image_size; it takes batch, seq, dtype"):
        load_target(f"{write(SMALL)}:build").program(image_size=224)


def test_a_function_that_names_train_is_told(write):
    target = load_target(
        write("from torch import nn, zeros\ndef build(train):\n    return nn.Linear(2, 4 if train else 3), zeros(1, 2)")
        + ":build"
    )
    assert report_of(target.program()).macs == 6
    assert target.program(train=True) is not None


def test_a_module_is_found_from_the_working_directory_and_leaves_the_path_alone(write, tmp_path, monkeypatch):
    write(SMALL, "mine_in_cwd.py")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert report_of(load_target("mine_in_cwd:build").program()).macs == macs_of_small(32)
    assert sys.path == before


def test_a_file_finds_its_neighbours(write):
    write("WIDTH = 5", "a_neighbour.py")
    path = write(
        "def build():\n    from torch import nn, zeros\n    import a_neighbour\n"
        "    return nn.Linear(2, a_neighbour.WIDTH), zeros(1, 2)"
    )
    assert report_of(load_target(f"{path}:build").program()).macs == 10


def test_inputs_may_be_a_mapping_of_keywords_and_the_model_any_callable(write):
    path = write(
        "import torch\ndef build():\n    w = torch.empty(4, 4, device='meta')\n"
        "    return (lambda *, x: x @ w), {'x': torch.zeros(2, 4)}"
    )
    assert report_of(load_target(f"{path}:build").program()).macs == 2 * 4 * 4


def test_real_weights_are_left_as_they_are(write):
    model = nn.Linear(2, 2)
    module = types.SimpleNamespace(build=lambda: (model, torch.zeros(1, 2)))
    target = load_target(f"{write(SMALL)}:build")
    program = type(target)("own", module.build, ()).program(train=True)
    report_of(program)
    assert model.weight.device.type == "cpu"
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def build():\n    return 3", "must return \\(model, inputs\\), not int"),
        ("def build():\n    return 3, 4", "must return"),
        ("def build():\n    raise KeyError('lost')", r"raised KeyError: 'lost' \(mine.py:2\)"),
        ("def build():\n    return (lambda x: 1 / 0), 1", r"raised ZeroDivisionError: division by zero \(mine.py:2\)"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("1 / 0", "importing .* raised ZeroDivisionError"),
        ("build = 3", "has no function build"),
        ("def build(:", "raised SyntaxError"),
    ],
)
def test_what_goes_wrong_in_a_target_is_told_with_its_place(write, text, says):
    with pytest.raises(TargetError, match=says):
        report_of(load_target(f"{write(text)}:build").program())


def test_unknown_names_list_the_near_ones():
    with pytest.raises(TargetError, match="gpt2-124m"):
        load_target("gpt2-125m")
    with pytest.raises(TargetError, match=r"there is no file missing\.py"):
        load_target("missing.py:build")
    with pytest.raises(TargetError, match="no_such_module"):
        load_target("no_such_module:build")


def test_inference_keeps_no_activations_and_training_does():
    target = load_target("bert-base")
    inference, training = (report_of(target.program(train=train, batch=4)) for train in (False, True))
    assert {row.name for row in inference.rows("phase")} == {"forward"}
    assert {row.name for row in training.rows("phase")} == {"forward", "backward", "optimizer"}
    weights = 2 * 109e6  # bf16
    assert weights < inference.peak_memory_bytes < 2 * weights
    assert training.peak_memory_bytes > 4 * weights  # gradients and two moments


def test_a_training_step_is_the_same_the_second_time():
    """The optimizer's state is made before the first step, which therefore is no other than the later ones."""
    program = load_target("encoder-layer").program(train=True, batch=1, seq=64)
    first, second = report_of(program), report_of(program)
    assert [row[:5] for row in first.rows("op")] == [row[:5] for row in second.rows("op")]


def test_autocast_runs_products_in_the_narrow_type_and_keeps_the_weights_wide():
    program = load_target("bert-base").program(dtype=torch.float32, autocast=torch.float16)
    assert report_of(program).main_dtype == "fp16"


def test_nothing_to_train_is_an_error(write):
    path = write("from torch import nn, zeros\ndef build():\n    return nn.ReLU(), zeros(1)")
    with pytest.raises(TargetError, match="no parameters to train"):
        load_target(f"{path}:build").program(train=True)


@pytest.mark.parametrize(
    ("name", "options", "items"),
    [
        ("bert-base", {"batch": 3, "seq": 128}, (3 * 128, "tokens")),
        ("encoder-layer", {"batch": 2, "seq": 64}, (128, "tokens")),
        ("resnet-50", {"batch": 5}, (5, "images")),
    ],
)
def test_items_are_tokens_or_images(name, options, items):
    program = load_target(name).program(**options)
    assert (program.items, program.unit) == items


@pytest.mark.parametrize("name", BUILTINS)
def test_every_built_in_model_is_a_target(name):
    assert load_target(name).accepts[0] == "batch"


def test_programs_built_inside_a_meter_leave_no_trace_in_it():
    programs = Programs(load_target("bert-base"), "batch", seq=32)
    with FlopMeter() as meter:
        programs(2)
    inside = meter.report()
    outside = report_of(load_target("bert-base").program(batch=2, seq=32))
    assert inside.rows("op") == outside.rows("op")
    assert inside.peak_memory_bytes == outside.peak_memory_bytes


# --- other packages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "package"), [("hf:llama", "transformers"), ("timm:resnet18", "timm")])
def test_a_missing_package_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TargetError, match=f"{package} .*pip install {package}"):
        load_target(name)


def test_timm_models_are_built_on_meta_at_their_own_size(monkeypatch):
    class Net(nn.Conv2d):
        default_cfg = {"input_size": (3, 96, 96)}  # noqa: RUF012

    made = types.ModuleType("timm")
    made.is_model = lambda name: name == "net"
    made.list_models = lambda: ["net"]
    made.create_model = lambda name, pretrained, **size: Net(3, 1, 1)
    monkeypatch.setitem(sys.modules, "timm", made)
    program = load_target("timm:net").program(batch=2)
    assert report_of(program).macs == 2 * 96 * 96 * 3
    assert (program.items, program.unit) == (2, "images")
    with pytest.raises(TargetError, match="near to it: net"):
        load_target("timm:nett")


@pytest.fixture
def timm():
    """Not imported here: that may need what the target does before."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")


@pytest.mark.parametrize(
    ("name", "gmacs"),  # the column infer_gmacs of timm's own results (github.com/huggingface/pytorch-image-models)
    [("resnet50", 4.11), ("vit_base_patch16_224", 17.58), ("convnext_tiny", 4.47), ("efficientnet_b0", 0.40)],
)
def test_timm_models_have_the_work_that_timm_publishes(timm, name, gmacs):
    program = load_target(f"timm:{name}").program(batch=2, image_size=224)
    assert report_of(program).macs / 2e9 == pytest.approx(gmacs, rel=0.01, abs=0.02)


def test_a_convolutional_net_of_timm_takes_another_size(timm):
    small, large = (report_of(load_target("timm:resnet18").program(image_size=size)) for size in (224, 448))
    assert large.macs == pytest.approx(4 * small.macs, rel=0.01)


def test_torchvision_without_its_library_of_ops_does_not_stop_timm(monkeypatch):
    """As PyPI's torchvision beside a CPU build of torch: it fails where it registers the shapes of nms."""

    def imports(_name):
        return torch.library.register_fake("torchvision::nms", lambda boxes, scores, threshold: None)

    monkeypatch.setattr(model_hubs, "import_module", imports)
    declared = []
    monkeypatch.setattr(model_hubs, "_declared", declared)
    if hasattr(torch.ops.torchvision, "nms"):
        pytest.skip("torchvision is here, with its ops")
    model_hubs._let_torchvision_load()
    assert hasattr(torch.ops.torchvision, "nms")
    assert len(declared) == 1


def test_what_timm_itself_lacks_is_named(monkeypatch):
    def imports(name):
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr(model_hubs, "import_module", imports)
    with pytest.raises(TargetError, match=r"timm cannot be imported .*pip install torchvision$"):
        load_target("timm:resnet18")


@pytest.fixture
def no_network(monkeypatch):
    """Opening a connection fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.fixture
def transformers(no_network):
    return pytest.importorskip("transformers")


def test_a_hugging_face_type_is_built_from_its_default_config(transformers):
    report = report_of(load_target("hf:bert").program(batch=2, seq=64))
    tokens, width, layers = 2 * 64, 768, 12
    linear = tokens * layers * 12 * width**2  # Q, K, V, out and the two of the feed-forward
    attention = 2 * layers * 2 * 64**2 * width
    pooler = 2 * width**2
    assert report.macs == linear + attention + pooler


def test_a_config_file_decides_class_and_type(transformers, tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
    path.write_text(json.dumps({**kind, **sizes, "vocab_size": 1000, "max_position_embeddings": 256}))
    report = report_of(load_target(f"hf:{path}").program(train=True))
    assert report.rows("module")[0].name == "LlamaForCausalLM"
    assert report.main_dtype == "fp16"
    assert {row.name for row in report.rows("phase")} == {"forward", "backward", "optimizer"}
    with pytest.raises(TargetError, match="beyond the model's 256 positions"):
        load_target(f"hf:{path}").program(seq=512)


def test_a_vision_type_gets_images(transformers):
    program = load_target("hf:vit").program(batch=3)
    assert (program.items, program.unit) == (3, "images")
    assert report_of(program).macs > 3 * 16e9


def test_a_speech_type_gets_as_much_sound_as_its_own_feature_extractor_gives(transformers):
    import numpy

    program = load_target("hf:whisper").program(batch=2)
    assert (program.items, program.unit) == (2, "recordings")
    with FlopMeter() as meter:
        program.run()
    first = meter.trace.ops[0].call.inputs[0]
    half_a_minute = numpy.zeros(30 * 16_000, dtype=numpy.float32)
    extracted = transformers.WhisperFeatureExtractor()([half_a_minute] * 2, sampling_rate=16_000).input_features
    assert first.shape == numpy.shape(extracted)
    assert load_target("hf:wav2vec2").program().items == 1


def test_a_type_that_compares_texts_with_images_gets_both(transformers):
    report = report_of(load_target("hf:clip").program(batch=3))
    text = 77 * 12 * 12 * 512**2 + 12 * 2 * 77**2 * 512 + 512 * 512  # layers, attention, projection
    patches = 1 + (224 // 32) ** 2
    image = (patches - 1) * 3 * 32**2 * 768 + patches * 12 * 12 * 768**2 + 12 * 2 * patches**2 * 768 + 768 * 512
    similarity = 3 * 3 * 512
    assert report.macs == pytest.approx(3 * (text + image) + similarity, rel=1e-4)


def test_wrong_configs_and_types_are_told(transformers, tmp_path):
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "new.json").write_text('{"model_type": "unheard_of"}')
    for name, says in [
        ("hf:lama", "near to it: .*llama"),
        ("hf:meta-llama/Llama-3.1-8B", r"save its config\.json"),
        (f"hf:{tmp_path}/config.json", "is no model config"),
        (f"hf:{tmp_path}/missing.json", "missing.json cannot be read: No such file"),
        (f"hf:{tmp_path}/new.json", "no model type 'unheard_of'"),
    ]:
        with pytest.raises(TargetError, match=says):
            load_target(name)
    with pytest.raises(TargetError, match="takes input_values, which flopmeter does not make up"):
        load_target("hf:encodec").program()
    with pytest.raises(TargetError, match="has no vocab_size"):
        load_target("hf:canine").program()
    with pytest.raises(TargetError, match=r"raised ValueError.*give file\.py:function"):
        load_target("hf:xclip").program().run()  # takes a film
    with pytest.raises(TargetError, match="takes sound, no seq"):
        load_target("hf:wav2vec2").program(seq=8)


# --- training and the hub ----------------------------------------------------------------------------------------


def test_the_optimizer_that_is_chosen_is_the_one_that_steps(write):
    target = load_target(f"{write(SMALL)}:build")
    plain = report_of(target.program(train=True, optimizer=optimizer_choice("sgd,momentum=0.9")))
    fused = report_of(target.program(train=True, optimizer=optimizer_choice("adamw,fused=true")))
    assert {row.name for row in plain.rows("op")} & {"_foreach_add_", "_foreach_mul_"}
    assert "_fused_adamw_" in {row.name for row in fused.rows("op")}


def test_checkpointing_runs_each_block_once_more_and_keeps_less(write):
    options = {"batch": 4, "seq": 256, "train": True}
    kept, again = (
        report_of(load_target("gpt2-124m").program(**options, checkpointing=checkpointing))
        for checkpointing in (False, True)
    )
    assert again.model_flops == kept.model_flops
    # torch stops once all that is kept is there again: before the block's last product, 4 of its 12 width x width ones.
    a_block = 8 * (2 * 4 * 256 * 768**2) + 2 * (2 * 4 * 256 * 256 * 768)
    assert sum(row.flops for row in again.rows("phase") if row.name == "recompute") == pytest.approx(
        12 * a_block, rel=0.01
    )
    assert again.memory.peak_bytes < kept.memory.peak_bytes


def test_a_model_of_the_hub_comes_from_the_cache_or_is_refused_in_one_line(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("transformers")
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "architectures": ["BertForMaskedLM"]}))  # fmt: skip
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(model_hubs, "urlopen", refuse)
    model, _, _ = load_target("hf:someone/tiny").built(batch=1, seq=8)
    assert type(model).__name__ == "BertForMaskedLM"
    with pytest.raises(TargetError, match=r"no network.*save its config\.json") as caught:
        load_target("hf:someone/else")
    assert "\n" not in str(caught.value)


def refuse(*_arguments, **_options):
    raise OSError("no network")

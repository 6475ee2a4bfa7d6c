"""scripts/fetch_measurements.py on small folders laid out like the public repositories."""

import csv
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import fetch_measurements  # noqa: E402
import measurement_tables  # noqa: E402
from fetch_measurements import SOURCES, checksum, fetch  # noqa: E402
from measurement_tables import OPERATORS, VIDUR_OPERATORS, TableError  # noqa: E402


def source(name):
    return next(source for source in SOURCES if source.name == name)


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def made(tmp_path, *names):
    """The folder of the tables made from the checkouts in tmp_path."""
    fetch(tmp_path / "tables", [source(name) for name in names], tmp_path, any_version=True)
    return tmp_path / "tables"


@pytest.fixture
def neusight(tmp_path):
    """One row of each operator, and BERT: two nodes before its layer, two in it, of which there are three."""
    top = tmp_path / "NeuSight/scripts/asplos"
    for folders, _, sizes in OPERATORS.values():
        for folder in folders:
            columns = ",".join(sizes.values())
            numbers = ",".join(str(7 * (place + 1)) for place in range(len(sizes)))
            write(
                top / f"data/dataset/train/collect/{folder}/p2.1.0/Tesla T4.csv",
                f"OPName,Latency,Device,Kernel Name,{columns}",
                f"{folder},0.123456789,Tesla T4,k,{numbers}",
            )
    write(top / "data/dataset/test/linear.csv", "OPName,Latency,Device,B,M,N,K", "linear,2.5,NVIDIA L4,1,512,1024,4096")
    write(top / "data/DLmodel_configs/bert_large.json", json.dumps(
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "vocab_size": 30522}
    ))  # fmt: skip
    label = top / "label/Tesla_T4/bert_large-train-512-8"
    write(label.with_suffix(".json"), json.dumps({"num_layer": 3, "e2e_latency": 20.0}))
    write(
        label.with_suffix(".csv"),
        "op,latency,fw_latency,bw_latency,acc_latency,Name",
        "x,1.5,1.0,0.5,0.0,size",
        "x,3,1,2,0,bert_encoder_layer_0_attention_self_query",
        "x,4,1,1,2,bert_encoder_layer_0_output_layer_norm",
    )
    write(top / "results/prediction/Tesla_T4/habitat/bert_large-train-512-8.json", json.dumps({"e2e_latency": 18.0}))
    return tmp_path


def test_neusights_n_is_what_is_contracted_and_latencies_have_five_digits(neusight):
    collected, tested = rows(made(neusight, "NeuSight") / "neusight/linear.csv")
    # the columns were M, K, N
    assert (collected["m"], collected["n"], collected["k"], collected["latency_ms"]) == ("7", "14", "21", "0.12346")
    assert (tested["gpu"], tested["n"], tested["k"], tested["source"]) == ("L4", "4096", "1024", "micro_test")


def test_each_table_of_neusight_has_the_columns_that_validate_reads(neusight):
    folder = made(neusight, "NeuSight") / "neusight"
    assert {path.stem for path in folder.glob("*.csv")} == {*OPERATORS, "e2e"}
    ops = {row["op"] for name in OPERATORS for row in rows(folder / f"{name}.csv")}
    assert {"linear", "bmm", "softmax", "layernorm", "conv2d", "add", "powu", "gelu"} <= ops
    (convolution,) = rows(folder / "conv2d.csv")
    assert {"batch", "c_in", "c_out", "kernel", "size", "stride", "padding"} <= set(convolution)


def test_a_network_agrees_with_itself_if_its_operators_take_as_long(neusight):
    (row,) = rows(made(neusight, "NeuSight") / "neusight/e2e.csv")
    # 1.5 before the layer; in it 3 and 2, three times; the 2 of accumulating gradients are not in
    assert row["sum_measured_ops_ms"] == "16.5"
    assert row["consistent"] == "False"  # 17.5 % off
    assert (row["gpu"], row["measured_ms"], row["habitat_ms"], row["neusight_ms"]) == ("T4", "20.0", "18.0", "")
    assert row["config"] == "layers=24;hidden=1024;heads=16;ffn=4096;vocab=30522"


def test_a_benchmark_of_timm_says_card_torch_and_mode_in_its_name(tmp_path):
    names = ("img_size", "samples_per_sec", "step_time", "batch_size", "gmacs", "macts")
    columns = ",".join(["model", *(f"infer_{name}" for name in names), "param_count"])
    results = tmp_path / "pytorch-image-models/results"
    for name in ("pt240-cu124-rtx3090", "pt291-cu128-4090-dynamo", "pt291-cu130-5090", "pt113-cu117-rtx3090"):
        write(results / f"benchmark-infer-amp-nchw-{name}.csv", columns, "vit,224,100.5,10.0,1,1.1,4.2,5.7")
    write(results / "benchmark-infer-amp-nhwc-pt240-cu124-rtx4090.csv", columns, "vit,224,100.5,10.0,1,1.1,4.2,5.7")
    write(
        results / "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv",
        "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count",
        "vit,50.0,20.0,1,224,5.7",
    )
    folder = made(tmp_path, "pytorch-image-models") / "timm"
    assert {(row["gpu"], row["mode"], row["torch"]) for row in rows(folder / "dev.csv")} == {
        ("rtx3090", "eager", "2.4.0+cu124"),
        ("rtx4090", "dynamo", "2.9.1+cu128"),
        ("rtx4090", "eager_nhwc", "2.4.0+cu124"),
    }
    assert rows(folder / "dev.csv")[0]["step_time_ms"] == "10.0"
    assert [row["torch"] for row in rows(folder / "rtx5090_eager.csv")] == ["2.9.1+cu130"]
    assert [(row["mode"], row["torch"]) for row in rows(folder / "rtx3090_train.csv")] == [("train", "1.12+cu113")]


@pytest.fixture
def aiconfigurator(tmp_path, monkeypatch):
    """Columns in JSON stand for those in parquet files, which another package reads."""
    monkeypatch.setattr(measurement_tables, "_parquet", lambda path: json.loads(path.read_text()))
    data = tmp_path / "aiconfigurator/aic-core/src/aiconfigurator_core/systems/data/h200_sxm"

    def put(path, **columns):
        longest = max(len(values) for values in columns.values())
        write(data / f"{path}_perf.parquet", json.dumps({name: v * (longest // len(v)) for name, v in columns.items()}))

    size = {"m": [64], "n": [128], "k": [256]}
    put("gemm/trtllm/1.0/gemm", gemm_dtype=["bfloat16", "fp8", "int8_wo"], latency=[1.0, 0.5, 0.7], **size)
    put("gemm/sglang/0.5/gemm", gemm_dtype=["bfloat16", "fp8"], latency=[3.0, 9.0], **size)
    put("gemm/vllm/0.2/gemm", gemm_dtype=["bfloat16"], latency=[4.0], power=[650.0], power_limit=[700.0], **size)
    context = {name: [1] for name in ("batch_size", "isl", "num_heads", "head_dim", "step", "window_size")}
    put(
        "attention/vllm/0.2/context_attention", kernel_source=["fa3"], num_key_value_heads=[0],
        attn_dtype=["bfloat16"], kv_cache_dtype=["bfloat16", "fp8"], latency=[0.2, 0.1], **context,
    )  # fmt: skip
    encoder = {name: [1] for name in ("batch_size", "isl", "num_heads", "head_dim")}
    put(
        "encoder_attention/vllm/0.2/encoder_attention", kernel_source=["fa3"], attn_dtype=["bfloat16"], latency=[0.3],
        **encoder,
    )  # fmt: skip
    moe = {name: [1] for name in (
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"
    )}  # fmt: skip
    put(
        "moe/vllm/0.2/moe", kernel_source=["a"], moe_dtype=["bfloat16", "fp8"], distribution=["balanced"],
        latency=[0.4, 0.2], **moe,
    )  # fmt: skip
    put(
        "comm/nccl/2.27/nccl", op_name=["all_gather"], nccl_dtype=["half"], num_gpus=[8], message_size=[512],
        latency=[0.01],
    )  # fmt: skip
    return made(tmp_path, "aiconfigurator") / "kernels"


def test_a_kernel_has_the_median_over_frameworks_and_their_extremes(aiconfigurator):
    bf16, fp8 = rows(aiconfigurator / "gemm.csv")
    assert (bf16["gpu"], bf16["ms"], bf16["ms_low"], bf16["ms_high"]) == ("h200-sxm-141gb", "3.0", "1.0", "4.0")
    assert (bf16["sources"], bf16["watts"]) == ("3", "650.0")
    assert (fp8["kind"], fp8["ms"], fp8["sources"]) == ("fp8", "0.5", "1")  # TensorRT-LLM's alone


def test_a_long_run_whose_power_was_logged_stands_beside_the_short_ones(aiconfigurator):
    (row,) = rows(aiconfigurator / "power.csv")
    assert (row["sustained_ms"], row["burst_ms"], row["limit_watts"]) == ("4.0", "2.0", "700.0")


def test_keys_of_eight_bits_and_experts_of_eight_bits_are_other_kernels(aiconfigurator):
    attention = {row["phase"]: row for row in rows(aiconfigurator / "attention.csv")}
    assert (attention["context"]["ms"], attention["encoder"]["num_key_value_heads"]) == ("0.2", "0")
    (experts,) = rows(aiconfigurator / "moe.csv")
    assert experts["ms"] == "0.4"
    (collective,) = rows(aiconfigurator / "collectives.csv")
    assert (collective["num_gpus"], collective["ms"]) == ("8", "0.01")


def test_vidurs_operators_are_medians_by_model_and_width(tmp_path):
    model = {"n_head": 32, "n_kv_head": 32, "n_embd": 2560, "n_expanded_embd": 10240, "vocab_size": 51200,
             "use_gated_mlp": False, "num_tokens": 8, "num_tensor_parallel_workers": 2}  # fmt: skip
    times = {
        f"time_stats.{name}.{kind}": number
        for name in VIDUR_OPERATORS[:-1]
        for kind, number in (("mean", 9), ("median", 5))
    }
    columns = {**times, **model}
    path = tmp_path / "vidur/data/profiling/compute/a40/microsoft/phi-2/mlp.csv"
    write(path, ",".join(columns), ",".join(map(str, columns.values())))
    (row,) = rows(made(tmp_path, "vidur") / "kernels/transformer_ops.csv")
    assert (row["gpu"], row["model"], row["emb_ms"]) == ("a40", "phi-2", "5")
    assert row["post_attention_layernorm_ms"] == ""  # phi-2 has none


def test_a_trace_is_taken_as_it_is(tmp_path):
    trace = tmp_path / "TraceLens/tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"gzipped")
    assert (made(tmp_path, "TraceLens") / "traces/h100_qwen1.5-0.5b.json.gz").read_bytes() == b"gzipped"


# --- which files


def test_files_of_another_version_are_refused_and_nothing_is_written(neusight, capsys):
    with pytest.raises(TableError, match="take that commit, or say --any-version"):
        fetch(neusight / "tables", [source("NeuSight")], neusight)
    assert not (neusight / "tables").exists()
    wanted = source("NeuSight")
    pinned = wanted._replace(sha256=checksum(neusight / "NeuSight", wanted.files))
    fetch(neusight / "tables", [pinned], neusight)
    told = (neusight / "tables/SOURCES.txt").read_text()
    assert wanted.commit in told
    assert "but other files" not in told
    assert "not made: papers/" in capsys.readouterr().out


def test_a_checksum_is_that_of_names_and_contents(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"1")
    # printf '%s  a.csv\n' $(printf 1 | sha256sum | cut -d' ' -f1) | sha256sum
    expected = "7ea2fe33a470db0ddcd487658834046ed293c46029a84c846fafca4e5716373c"
    assert checksum(tmp_path, ["*.csv"]) == expected
    (tmp_path / "a.csv").rename(tmp_path / "b.csv")
    assert checksum(tmp_path, ["*.csv"]) != expected


def test_from_the_network_only_the_files_of_the_tables_are_kept(tmp_path, monkeypatch):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for name in ("data/profiling/compute/a40/microsoft/phi-2/mlp.csv", "setup.py"):
            member = tarfile.TarInfo(f"vidur-7d47513/{name}")
            member.size = 1
            file.addfile(member, io.BytesIO(b"x"))
    archive.seek(0)
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda address: asked.append(address) or archive)
    fetch_measurements._download(source("vidur"), tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mlp.csv"]
    assert asked == ["https://codeload.github.com/microsoft/vidur/tar.gz/7d47513363ec447a741ac5e47241580b47724fbf"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "say where the tables go"),
        (["tables", "--only", "vidurr"], "no source is named vidurr; there are NeuSight"),
        (["tables", "--from", ".", "--only", "vidur"], "vidur is missing: a checkout of github.com/microsoft/vidur"),
    ],
)
def test_a_wrong_use_says_what_to_do(arguments, told, tmp_path):
    command = [sys.executable, str(SCRIPTS / "fetch_measurements.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_each_source_has_a_commit_and_a_checksum():
    for one in SOURCES:
        assert len(one.commit) == 40, one.name
        assert len(one.sha256) == 64, one.name
        assert one.files, one.name

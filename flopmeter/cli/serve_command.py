"""The subcommand serve: requests, latencies, power and money of a language model on each device."""

from __future__ import annotations

import argparse
from typing import get_args

from flopmeter.ask.serve import serving
from flopmeter.ask.serve.asked import read_slo
from flopmeter.ask.serve.cache import CacheKind
from flopmeter.ask.serve.picture import serving_curves
from flopmeter.ask.serve.published import KV_BYTES, WEIGHTS
from flopmeter.ask.serve.serving import USUAL_CHUNK
from flopmeter.cli.command import Command, add_energy_price, add_format, device_list, number, picked, share, show
from flopmeter.cli.prices import load_prices
from flopmeter.device.cluster import device_in
from flopmeter.meter import Mode
from flopmeter.report.plots import save
from flopmeter.report.tables import FORMATS

DEVICE = "h100-sxm5-80gb"  # which is taken where none is named


def _serve(options: argparse.Namespace) -> int:
    if options.draft is None and (options.acceptance is not None or options.draft_tokens is not None):
        raise ValueError("--acceptance and --draft-tokens are of a draft: give its model with --draft")
    devices = device_list(options.hardware or device_in(options.cluster, DEVICE))
    prices = load_prices(options.price, devices)
    result = serving(
        options.target,
        devices,
        output=options.output_tokens,
        chunk=None if options.no_chunks else options.chunk or "usual",
        prefix=options.prefix or 0.0,
        prices=prices.dollars_per_hour,
        progress=options.progress.over,
        **picked(options, "prompt", "slo", "gpus", "mode", "weights", "kv", "draft", "draft_tokens", "acceptance"),
        **picked(options, "expert_parallel", "disaggregated", "cache", "cluster", "dollars_per_kwh"),
    )
    show(result.with_note(prices.source).with_note(f"ran: {options.command}").render(options.format), options)
    if options.plot:
        save(serving_curves(result), options.plot)
    return 0 if any(row.best for row in result.rows) else 1


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "target",
        metavar="TARGET",
        help="a built-in Llama (llama-3-8b), or hf:CONFIG.json, hf:TYPE, hf:OWNER/NAME: a causal language model of "
        "transformers",
    )
    requests = parser.add_argument_group("requests").add_argument
    gpus = parser.add_argument_group("GPUs and prices")
    engine = parser.add_argument_group("engine")
    add = gpus.add_argument
    add("--hardware", metavar="A,B,C", help=f"devices (default: that of --cluster, or {DEVICE})")
    requests("--prompt", metavar="N", type=number, required=True, help="tokens of a request's prompt")
    requests("--output", metavar="N", type=number, required=True, dest="output_tokens", help="tokens that it wants")
    requests(
        "--slo", metavar="ttft=500ms,tpot=30ms", type=_slo, help="latencies to keep to: first token, each other token"
    )
    add("--gpus", metavar="N", type=number, default=1, help="tensor parallel GPUs of one copy (default: %(default)s)")
    add(
        "--expert-parallel", action="store_true",
        help="spread experts over them instead; each has all else, and requests of its own",
    )  # fmt: skip
    add("--cluster", metavar="NAME|FILE", help="links between GPUs (default: those that each device comes in)")
    add("--price", metavar="NAME=DOLLARS|FILE", nargs="+", action="extend", default=[], help="dollars per GPU and hour")
    add_energy_price(gpus)
    add = engine.add_argument
    add("--mode", choices=get_args(Mode), default="cudagraph", help="how a step is launched (default: %(default)s)")
    add("--weights", choices=WEIGHTS, help="how products keep weights (default: as published, else bf16)")
    add("--kv", choices=KV_BYTES, help="how the cache is kept (default: as the config says, else bf16)")
    cuts = engine.add_mutually_exclusive_group()
    cuts.add_argument(
        "--chunk", metavar="N", type=number, help=f"tokens of a prompt in a step (default: {USUAL_CHUNK})"
    )
    cuts.add_argument("--no-chunks", action="store_true", help="prefill stops decoding")
    requests("--prefix", metavar="SHARE", type=share, help="of each prompt, what the cache has already (0 to 1)")
    add("--draft", metavar="TARGET", help="a smaller model that proposes tokens")
    add("--draft-tokens", metavar="N", type=number, help="that it proposes at a time (default: 4)")
    add("--acceptance", metavar="SHARE", type=share, help="with which each is accepted (default: 0.7)")
    add("--disaggregated", action="store_true", help="GPUs of their own for prefill")
    add(
        "--cache", choices=get_args(CacheKind), default="paged", help="who holds keys and values (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="also draw latency over throughput to a .png or .svg (needs matplotlib)"
    )
    add_format(parser, FORMATS, flag="--output-file")


def _slo(text: str) -> dict[str, float]:
    try:
        return read_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


COMMAND = Command(
    _serve,
    "A language model as a server: requests, latencies, tokens a second, power, money",
    "Example: flopmeter serve hf:config.json --hardware h100-sxm5-80gb,l40s --prompt 2048 --output 512"
    " --slo ttft=500ms,tpot=30ms --price l40s=0.9 h100-sxm5-80gb=2.5\n",
    _arguments,
)

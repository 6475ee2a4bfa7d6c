"""flex_attention outside of torch.compile, where torch runs it op by op over the whole matrix of scores."""

from __future__ import annotations

from collections.abc import Iterator

from flopmeter.launch.templates import with_templates
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import in_templates
from flopmeter.report.report import Report


@remedy
def uncompiled_flex_attention(report: Report) -> Iterator[Proposal]:
    """Eager calls of flex_attention, whose one kernel exists only compiled. The rest may stay eager."""
    trace = trace_of(report)
    inside = in_templates(trace)
    if inside and not report.launches.mode.fuses:
        yield Proposal(
            "", of_ops(trace, inside), "outside of torch.compile it writes the whole matrix of scores, and reads it",
            "torch.compile(flex_attention), which is one kernel", priced(report, with_templates(trace)),
        )  # fmt: skip

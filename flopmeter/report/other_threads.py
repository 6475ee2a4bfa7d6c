"""What a report says of copies that another thread of the program makes, and that no meter times."""

from __future__ import annotations

from collections.abc import Sequence

from flopmeter.device.hardware import Hardware
from flopmeter.records.work import HostCopy
from flopmeter.report.quantities import duration, with_prefix
from flopmeter.timing.bandwidth import link_seconds
from flopmeter.trace.other_threads import ThreadCopy

LEAST_BYTES = 50_000_000  # about 2 ms of a link: more than a batch of data, less than a layer that waits on the host


def missed_copies(copies: Sequence[ThreadCopy], hardware: Hardware) -> str:
    """A caution where such copies move as much as layers whose weights wait on the host do; else ''."""
    nbytes = sum(copy.nbytes for copy in copies)
    if nbytes < LEAST_BYTES:
        return ""
    most = max(copies, key=lambda copy: copy.nbytes)
    seconds = link_seconds(HostCopy(nbytes), hardware)
    return (
        f"another thread copies {with_prefix(nbytes, 'B')} between host and device (the largest at {most.where}), which"
        f" is not metered: {duration(seconds)} on their link, of which what no kernel hides adds to the time"
    )

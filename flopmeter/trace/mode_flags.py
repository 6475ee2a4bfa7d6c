"""What torch says, for all threads at once, of the dispatch modes that are on."""

from __future__ import annotations

from flopmeter.torch_names import private


def tell_modes() -> None:
    """Set torch's flags to the modes of this thread.

    A mode sets them when it is entered, and restores what it found when it is left. Where modes of two threads overlap,
    the one that is left last restores what the other had set, and that stays: guards of compiled functions, which read
    the flags, then fail at each call.
    """
    modes = private.dispatch_mode_stack()
    visible = any(not mode.ignore_compile_internals() for mode in modes)
    for flag, is_set in (
        (private.IN_MODE, bool(modes)),
        (private.IN_PLAIN_MODE, any(not mode.is_infra_mode() for mode in modes)),
        (private.IN_VISIBLE_MODE, visible),
    ):
        if flag.present():
            setattr(flag.owner, flag.attribute, is_set)
    if private.GUARDS_SEE_MODES.present():
        private.GUARDS_SEE_MODES.value(visible)

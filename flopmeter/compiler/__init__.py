"""What torch.compile launches, asked of the compiler itself: Dynamo traces the program, AOTAutograd and the min-cut
partitioner make its graphs, and inductor schedules their kernels, all on meta tensors that pose as the device's.

session.py stands between Dynamo and inductor while a meter is open, frames.py around what Dynamo traces; posing.py
answers for the missing device; lowering.py goes through inductor up to its Scheduler; plan.py, regions.py and
origins.py read from there which kernels run, on what, and which ops of the program they are, flex.py what
flex_attention computes; replay.py records them at each call; pricing.py is their cost. exports.py is torch.export's and
AOTInductor's way to the same kernels.
"""

from flopmeter.compiler.exports import Exports
from flopmeter.compiler.frames import AroundTracing, nothing_around
from flopmeter.compiler.posing import PosedDevice
from flopmeter.compiler.session import OnCompiledCall, Session

__all__ = ["AroundTracing", "OnCompiledCall", "Exports", "PosedDevice", "Session", "nothing_around"]

"""How long a step of one of torch's pipelines takes, by brute force through torch's own tables of actions.

F, I and W (a forward pass, the gradient of the input and that of the weights) take one unit each, and messages no time.
It knows of torch's tables and of NCCL's streams, and nothing of how flopmeter times.
"""

from __future__ import annotations

from collections import deque

from pipeline_programs import scheduled
from torch.distributed.pipelining.schedules import _batch_p2p

from flopmeter.distributed import world
from flopmeter.distributed.ranks import run_ranks

# NCCL has a stream for the messages of each pair of ranks, and one for all that is coalesced. Torch 2.11 coalesces each
# message, as a batch of one: those of a rank wait in one line, also a send behind a receive of what is not there yet.
# (The docstring of torch 2.13's _batch_p2p, which sends them alone, calls that head-of-line blocking.)
MESSAGES_SENT_ALONE = "isend" in _batch_p2p.__code__.co_names
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
Action = tuple[str, int, int]  # kind, stage and microbatch
Message = tuple[str, int, int]  # F or B, the stage that receives it, and the microbatch


def longest_path(schedule: type, ranks: int, microbatches: int, chunks: int) -> float:
    """In units: an action runs after the one before on its rank and after the message that it needs. A message goes
    once both ranks have come to it, on the streams of both."""
    tables, rank_of = tables_of(schedule, ranks, microbatches, chunks)
    clock = dict.fromkeys(tables, 0.0)
    lines: dict[tuple[int, object], deque[tuple[Message, float]]] = {}  # by rank and stream: what waits, since when
    free: dict[tuple[int, object], float] = {}
    arrived: dict[Message, float] = {}

    def post(rank: int, action: Action) -> None:
        kind, stage, microbatch = action
        way = 1 if kind.endswith("F") else -1
        receiver = stage + way if kind.startswith("SEND") else stage
        pair = frozenset((rank_of[receiver - way], rank_of[receiver]))
        stream = (rank, pair if MESSAGES_SENT_ALONE else "coalesced")
        lines.setdefault(stream, deque()).append(((kind[-1], receiver, microbatch), clock[rank]))

    def compute(rank: int, group: list[Action]) -> bool:
        needed = {action: message for action in group if (message := needs(action, rank_of)) is not None}
        if any(message not in arrived for message in needed.values()):
            return False
        for action in group:
            clock[rank] = max(clock[rank], arrived.get(needed.get(action), 0.0)) + UNITS[action[0]]
        return True

    def exchange() -> bool:
        first: dict[Message, list[tuple[tuple[int, object], float]]] = {}
        for stream, line in lines.items():
            if line:
                first.setdefault(line[0][0], []).append((stream, line[0][1]))
        met = {message: sides for message, sides in first.items() if len(sides) == 2}
        for message, sides in met.items():
            arrived[message] = max(max(since, free.get(stream, 0.0)) for stream, since in sides)
            for stream, _ in sides:
                free[stream] = arrived[message]
                lines[stream].popleft()
        return bool(met)

    moved = True
    while moved:
        moved = False
        for rank, groups in tables.items():
            while groups and (groups[0][0][0] not in UNITS or compute(rank, groups[0])):
                group = groups.popleft()
                if group[0][0] not in UNITS:
                    post(rank, group[0])
                moved = True
        moved |= exchange()
    assert not any(tables.values())
    return max(clock.values())


def needs(action: Action, rank_of: dict[int, int]) -> Message | None:
    """The message that an action waits for: none at either end, and none between two stages of one rank."""
    kind, stage, microbatch = action
    before = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind)
    if before not in rank_of or rank_of[before] == rank_of[stage]:
        return None
    return ("F" if kind == "F" else "B", stage, microbatch)


def tables_of(
    schedule: type, ranks: int, microbatches: int, chunks: int
) -> tuple[dict[int, deque[list[Action]]], dict[int, int]]:
    """Of each rank what torch says that it does, in order, what DualPipe pairs together; and the rank of each stage."""
    tables: dict[int, deque[list[Action]]] = {}
    rank_of: dict[int, int] = {}

    def table(rank: int) -> None:
        with world(ranks, {"pp": ranks}, rank) as mesh:
            step = scheduled(schedule, mesh, chunks=chunks, microbatches=microbatches)
            made = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, schedule))
            order = made._get_pipeline_order() if chunks == 1 else made.pipeline_order_with_comms
            groups = [
                [
                    (part.computation_type.value, part.stage_index, part.microbatch_index)
                    for part in action.sub_actions or (action,)
                ]
                for action in order[rank]
                if action is not None
            ]
            rank_of.update({stage: stage for stage in range(ranks)} if chunks == 1 else made.stage_index_to_group_rank)
            tables[rank] = deque(with_messages(groups, ranks) if chunks == 1 else groups)

    run_ranks(range(ranks), table)
    known = (*UNITS, "SEND_F", "RECV_F", "SEND_B", "RECV_B")
    return {rank: deque(g for g in groups if g[0][0] in known) for rank, groups in tables.items()}, rank_of


def with_messages(groups: list[list[Action]], stages: int) -> list[list[Action]]:
    """A schedule of one stage on each rank receives just before an action, and sends just after it."""
    found: list[list[Action]] = []
    for ((kind, stage, microbatch),) in groups:
        way, letter = (1, "F") if kind == "F" else (-1, "B")
        if 0 <= stage - way < stages:
            found.append([(f"RECV_{letter}", stage, microbatch)])
        found.append([(kind, stage, microbatch)])
        if 0 <= stage + way < stages:
            found.append([(f"SEND_{letter}", stage, microbatch)])
    return found

"""Find the repeated blocks of a program, so that each kind of block is written once as a class.

A program becomes a list of items in order: steps of the model itself, calls of blocks (numbered
modules), and loops over blocks that feed each other. Blocks with the same steps up to names have
the same `key` and share a class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.ir import Ref, iter_refs
from shardwise.ir.blocks import MIN_BLOCK_NODES, assign_blocks, block_spans
from shardwise.program import RankProgram, Step
from shardwise.program.recompute import keeps_products
from shardwise.sharding.rule import MeshAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """One block: its module path, its steps, their inputs and outputs."""

    path: str
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]  # values from outside, in order of first use
    outputs: tuple[str, ...]  # values used outside
    own: tuple[str, ...]  # values of its own parameters and buffers
    key: str = field(default="", compare=False)

    @property
    def group(self) -> str | None:
        """The recomputation group of all its steps, if they have a common one."""
        groups = {step.recompute for step in self.steps}
        return groups.pop() if len(groups) == 1 else None


Item = Step | BlockCall


def find_blocks(program: RankProgram, owners: Mapping[str, str]) -> list[Item]:
    """Return the program's steps with numbered modules folded into blocks.

    A block's steps are contiguous and enough for a class. `owners` maps parameter and buffer values
    to their full names.
    """
    blocks = assign_blocks([s.fn for s in program.steps], [s.module for s in program.steps])
    steps, blocks = _hoist(list(program.steps), blocks)
    spans = {
        path: (first, last)
        for path, (first, last) in block_spans(blocks).items()
        if all(block == path for block in blocks[first:last])
        and sum(not step.is_move for step in steps[first:last]) >= MIN_BLOCK_NODES
    }
    items: list[Item] = []
    position = 0
    ends = set(final_values(program))
    for path, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        items += steps[position:first]
        items.append(_block(path, steps, first, last, owners, ends))
        position = last
    return items + steps[position:]


def final_values(program: RankProgram) -> tuple[str, ...]:
    """Return the values needed after the last step."""
    produced = {out for step in program.output_steps for out in step.outputs}
    names = [program.loss] if program.loss else []
    names += [*program.sends, *(name for _, name in program.mutations)]
    names += [n for step in program.output_steps for n in step.inputs if n not in produced]
    names += [ref.name for ref in iter_refs(program.outputs) if ref.name not in produced]
    return tuple(dict.fromkeys(names))


def _hoist(steps: list[Step], blocks: list[str | None]) -> tuple[list[Step], list[str | None]]:
    """Move redistributions before the block if their operand or other users are outside it."""
    block_of = {out: h for step, h in zip(steps, blocks, strict=True) for out in step.outputs}
    users: dict[str, set[str | None]] = {}
    for step, block in zip(steps, blocks, strict=True):
        for name in step.inputs:
            users.setdefault(name, set()).add(block)
    first = {path: extent[0] for path, extent in block_spans(blocks).items()}
    produced_at = {out: index for index, step in enumerate(steps) for out in step.outputs}
    order: list[tuple[int, int, Step, str | None]] = []
    for index, (step, block) in enumerate(zip(steps, blocks, strict=True)):
        source = block_of.get(step.inputs[0]) if step.is_move else block
        shared = source != block and bool(users.get(step.outputs[0], set()) - {block})
        foreign = step.is_move and source is None and step.inputs[0] in block_of
        if block is not None and step.is_move and (shared or foreign):
            block_of[step.outputs[0]] = None
            outside = replace(step, module=block, module_class="", recompute=None)
            # A module that is called twice begins before the input of its second call exists.
            at = first[block] if produced_at.get(step.inputs[0], -1) < first[block] else index
            order.append((at, 0, outside, None))
        else:
            order.append((index, 1, step, block))
    order.sort(key=lambda item: item[:2])
    return [step for _, _, step, _ in order], [block for *_, block in order]


def _block(
    path: str, steps: list[Step], first: int, last: int, owners: Mapping[str, str], ends: set[str]
) -> BlockCall:
    inside = tuple(steps[first:last])
    produced = {out for step in inside for out in step.outputs}
    used_after = {n for step in steps[last:] for n in step.inputs} | ends
    used = dict.fromkeys(n for step in inside for n in step.inputs if n not in produced)
    own = tuple(n for n in used if owners.get(n, "").startswith(f"{path}."))
    inputs = tuple(n for n in used if n not in own)
    outputs = tuple(o for step in inside for o in step.outputs if o in used_after)
    block = BlockCall(path=path, steps=inside, inputs=inputs, outputs=outputs, own=own)
    return replace(block, key=signature(block, owners))


def signature(block: BlockCall, owners: Mapping[str, str]) -> str:
    """Return a text that is equal for blocks that differ only in names and weights."""
    names = {value: f"in{index}" for index, value in enumerate(block.inputs)}
    names |= {value: owners[value].removeprefix(f"{block.path}.") for value in block.own}
    lines = []
    groups = _part_groups(block)
    for step in block.steps:
        for out in step.outputs:
            names[out] = f"v{len(names)}"
        lines.append(
            f"{[names[o] for o in step.outputs]}={step.fn}"
            f"({_sign(step.args, names, block.path)},{_sign(step.kwargs, names, block.path)})"
            f"{step.axes}{step.grad_enabled}{step.autocast}{_sign_group(step, groups)}"
            f"{step.module.removeprefix(block.path)}{step.module_class}"
        )
    lines.append(str([names[o] for o in block.outputs]))
    return "\n".join(lines)


def _part_groups(block: BlockCall) -> dict[str | None, int]:
    """Enumerate the recomputation groups of parts of the block; none if one covers all of it."""
    if block.group is not None:
        return {}
    groups = dict.fromkeys(step.recompute for step in block.steps if step.recompute)
    return {group: number for number, group in enumerate(groups)}


def _sign_group(step: Step, groups: Mapping[str | None, int]) -> str:
    if step.recompute not in groups:
        return ""
    return f"{groups[step.recompute]}{keeps_products(step.recompute)}"


def _sign(arg: Any, names: Mapping[str, str], path: str) -> str:
    if isinstance(arg, Ref):
        return names[arg.name]
    if isinstance(arg, MeshAxis):
        return ".".join(arg.names)
    if isinstance(arg, tuple | list):
        return "[" + ",".join(_sign(a, names, path) for a in arg) + "]"
    if isinstance(arg, str):
        return repr(arg.replace(f"{path}.", "{path}."))
    return repr(arg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Consecutive blocks of one class, each using the results of the one before."""

    calls: tuple[BlockCall, ...]
    carried: tuple[tuple[int, int], ...]  # (input position, output position)


def fold_loops(items: list[Item], used: Mapping[str, int]) -> list[Item | Loop]:
    """Fold chains of equal blocks into loops; `used` counts the uses of every value."""
    folded: list[Item | Loop] = []
    chain: list[BlockCall] = []

    def close() -> None:
        if len(chain) > 1:
            folded.append(Loop(calls=tuple(chain), carried=_carried(chain[0], chain[1])))
        else:
            folded.extend(chain)
        chain.clear()

    for item in items:
        if not isinstance(item, BlockCall):
            close()
            folded.append(item)
            continue
        if chain and not _follows(chain, item, used):
            close()
        chain.append(item)
    close()
    return folded


def _carried(a: BlockCall, b: BlockCall) -> tuple[tuple[int, int], ...]:
    return tuple(
        (i, a.outputs.index(value)) for i, value in enumerate(b.inputs) if value in a.outputs
    )


def _follows(chain: list[BlockCall], following: BlockCall, used: Mapping[str, int]) -> bool:
    """Return whether a block continues the chain: same class, next number, same inputs."""
    last = chain[-1]
    if following.key != last.key or not _next_path(last.path, following.path):
        return False
    if _recomputation(following) != _recomputation(last):
        return False
    carried = _carried(last, following)
    if not carried or (len(chain) > 1 and carried != _carried(chain[-2], last)):
        return False
    if len({o for _, o in carried}) != len(last.outputs):
        return False
    positions = dict(carried)
    pairs = enumerate(zip(last.inputs, following.inputs, strict=True))
    fixed = all(a == b for i, (a, b) in pairs if i not in positions)
    only_here = all(used[o] == following.inputs.count(o) for o in last.outputs)
    return fixed and only_here


def _recomputation(block: BlockCall) -> tuple[bool, bool]:
    return block.group is not None, keeps_products(block.group)


def _next_path(a: str, b: str) -> bool:
    left, _, first = a.rpartition(".")
    right, _, second = b.rpartition(".")
    return left == right and int(second) == int(first) + 1

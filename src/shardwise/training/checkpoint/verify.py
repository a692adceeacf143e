"""Every byte of a checkpoint against its checksum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.training.checkpoint.manifest import full_name
from shardwise.training.checkpoint.opening import Opened, open_checkpoint
from shardwise.training.checkpoint.reading import Reader

__all__ = ["Verified", "verify_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was read, and what is wrong with it."""

    opened: Opened
    num_boxes: int
    num_unchecked: int
    bytes_read: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_checkpoint(path: str | Path) -> Verified:
    """Read all of a checkpoint; each box that differs from what was written is a problem.

    Files of Hugging Face have no checksums: of them the headers are checked.
    """
    opened = open_checkpoint(path)
    problems: list[str] = []
    boxes = unchecked = 0
    with Reader(opened.folder, opened.manifest) as reader:
        for section, tensors in opened.manifest.sections.items():
            for name, tensor in tensors.items():
                for stored in tensor.boxes:
                    boxes += 1
                    unchecked += stored.crc32 is None
                    try:
                        if stored.crc32 is not None:
                            reader.check(tensor, stored, full_name(section, name))
                    except CheckpointError as error:
                        problems.append(error.message)
        read = reader.bytes_read
    return Verified(
        opened=opened,
        num_boxes=boxes,
        num_unchecked=unchecked,
        bytes_read=read,
        problems=tuple(dict.fromkeys(problems)),
    )

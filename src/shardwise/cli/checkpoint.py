"""`shardwise checkpoint`: what is in one, whether it is sound, and other forms of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, load_target
from shardwise.cli.output import require_own
from shardwise.formatting import Column, size, table, terminal_width

if TYPE_CHECKING:
    from shardwise.checkpoint.opening import Opened


app = typer.Typer(no_args_is_help=True, help="Look at, check and convert checkpoints.")

Folder = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Its folder, or one of Hugging Face.")
]


@app.command()
def inspect(
    folder: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is in a checkpoint; its tensors are not read."""
    from shardwise.checkpoint.opening import open_checkpoint

    opened = open_checkpoint(folder)
    if as_json:
        typer.echo(json.dumps(_as_json(opened, tensors), indent=2))
        return
    manifest = opened.manifest
    step = "" if manifest.step is None else f", step {manifest.step}"
    kind = "Hugging Face folder" if opened.foreign else "checkpoint"
    lines = [f"{kind} {opened.folder}{step}: {size(manifest.nbytes)}"]
    lines += [f"{len(manifest.files)} files, {size(sum(manifest.files.values()))}", ""]
    rows = []
    for section, found in manifest.sections.items():
        boxes = sum(len(t.boxes) for t in found.values())
        held = size(sum(t.nbytes for t in found.values()))
        rows.append([str(len(found)), str(boxes), held, section])
    columns = [Column("tensors"), Column("boxes"), Column("size")]
    lines += table(columns, "section", rows, terminal_width())
    if tensors:
        columns = [Column("boxes"), Column("type"), Column("shape")]
        listed = [[str(t["boxes"]), t["dtype"], str(t["shape"]), n] for n, t in _listed(opened)]
        lines += ["", *table(columns, "tensor", listed, terminal_width())]
    if manifest.extra:
        lines += ["", f"extra: {', '.join(manifest.extra)}"]
    typer.echo("\n".join(lines))


@app.command()
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read all of a checkpoint and compare checksums; exit 1 if something is damaged."""
    from shardwise.checkpoint.opening import previous_of, verify_checkpoint

    found = verify_checkpoint(folder)
    earlier = None if found.ok else previous_of(folder)
    if as_json:
        told = {
            "ok": found.ok,
            "boxes": found.num_boxes,
            "without_checksum": found.num_unchecked,
            "bytes": found.bytes_read,
            "problems": list(found.problems),
            "previous": None if earlier is None else str(earlier),
        }
        typer.echo(json.dumps(told, indent=2))
    elif found.ok:
        note = f", {found.num_unchecked} of them without checksums" if found.num_unchecked else ""
        typer.echo(f"{folder}: sound, {found.num_boxes} boxes{note}, {size(found.bytes_read)} read")
    else:
        typer.echo("\n".join(found.problems))
        if earlier is not None:
            typer.echo(f"  try: the previous checkpoint, {earlier}")
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def convert(
    folder: Folder,
    to: Annotated[
        str, typer.Option("--to", help="hf, torch (a file of weights) or shardwise (one rank).")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output folder, or file for --to torch.")
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="For hf: config.json, or the folder with it."),
    ] = None,
    section: Annotated[
        str, typer.Option("--section", help="Which weights to take as the model: ema, …")
    ] = "model",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of floating-point tensors: bfloat16, …")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, a plain torch file, or one of ours."""
    from shardwise.checkpoint.convert import convert_checkpoint
    from shardwise.checkpoint.files import dtype_named

    kind = None if dtype is None else dtype_named(dtype, "--dtype")
    files = convert_checkpoint(folder, out, to=to, config=config, section=section, dtype=kind)
    if as_json:
        typer.echo(json.dumps({"files": [str(file) for file in files]}, indent=2))
    else:
        typer.echo("\n".join(f"{file}  {size(file.stat().st_size)}" for file in files))


def _as_json(opened: Opened, tensors: bool) -> dict[str, Any]:
    manifest = opened.manifest
    told: dict[str, Any] = {
        "folder": str(opened.folder),
        "form": "hf" if opened.foreign else "shardwise",
        "step": manifest.step,
        "bytes": manifest.nbytes,
        "files": dict(manifest.files),
        "sections": {
            section: {
                "tensors": len(found),
                "boxes": sum(len(t.boxes) for t in found.values()),
                "bytes": sum(t.nbytes for t in found.values()),
            }
            for section, found in manifest.sections.items()
        },
        "aliases": dict(manifest.aliases),
        "extra": dict(manifest.extra),
    }
    return {**told, "tensors": dict(_listed(opened))} if tensors else told


def _listed(opened: Opened) -> list[tuple[str, dict[str, Any]]]:
    from shardwise.checkpoint.manifest import full_name
    from shardwise.dtypes import dtype_name

    return [
        (
            full_name(section, name),
            {"dtype": dtype_name(t.dtype), "shape": list(t.shape), "boxes": len(t.boxes)},
        )
        for section, found in opened.manifest.sections.items()
        for name, t in found.items()
    ]


# `shardwise export`: a checkpoint as a program or a folder for serving.


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="Its folder, or one of Hugging Face.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Output file MODEL.pt2 for a program, or output folder."),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="For a program: MODULE.py:FUNCTION returning (model, inputs)."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="For a folder: config.json, or the folder.")
    ] = None,
    section: Annotated[
        str, typer.Option("--section", help="Which weights to take as the model: ema, …")
    ] = "model",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of floating-point weights: bfloat16, …")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model for serving: a torch.export program, or a Hugging Face folder."""
    from shardwise.checkpoint.files import dtype_named
    from shardwise.checkpoint.write import require_free
    from shardwise.training.export import PROGRAM
    from shardwise.training.export import export as write

    if out.suffix == PROGRAM:
        require_own(out, "program")
        if model is None:
            raise typer.BadParameter(f"{out} needs --model MODULE.py:FUNCTION, of (model, inputs)")
    else:
        require_free(out)
    loaded = None if model is None else load_target(model)
    kind = None if dtype is None else dtype_named(dtype, "--dtype")
    made = write(
        checkpoint,
        out,
        model=None if loaded is None else loaded.model,
        batch=None if loaded is None else loaded.batch,
        dtype=kind,
        config=config,
        section=section,
    )
    files = [made] if made.is_file() else sorted(made.iterdir())
    shown = [f"{file}  {file.stat().st_size:,} bytes" for file in files]
    typer.echo(json.dumps({"files": [str(f) for f in files]}) if as_json else "\n".join(shown))

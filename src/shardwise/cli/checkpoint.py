"""`shardwise checkpoint` and `export`: inspect, verify and convert checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, load_target
from shardwise.cli.output import FAILURE, echo, require_own
from shardwise.formatting import Column, size, table, terminal_width

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.opening import Opened

app = typer.Typer(no_args_is_help=True, help="Look at, check and convert checkpoints.")

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="Its folder, or one of Hugging Face.", show_default=False
    ),
]
Section = Annotated[
    str, typer.Option("--section", help="Which weights to take as the model: ema, …")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Dtype of floating-point tensors: bfloat16, …")
]


@app.command()
def inspect(
    folder: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is in a checkpoint, without reading its tensors."""
    from shardwise.checkpoint.opening import open_checkpoint

    opened = open_checkpoint(folder)
    manifest = opened.manifest
    if as_json:
        echo(_to_json(opened) | ({"tensors": dict(_listed(manifest))} if tensors else {}))
        return
    step = "" if manifest.step is None else f", step {manifest.step}"
    kind = "Hugging Face folder" if opened.foreign else "checkpoint"
    lines = [f"{kind} {opened.folder}{step}: {size(manifest.nbytes)}"]
    lines += [f"{len(manifest.files)} files, {size(sum(manifest.files.values()))}", ""]
    rows = [
        [str(total["tensors"]), str(total["boxes"]), size(total["bytes"]), section]
        for section, total in _totals(manifest).items()
    ]
    columns = [Column("tensors"), Column("boxes"), Column("size")]
    lines += table(columns, "section", rows, terminal_width())
    if tensors:
        columns = [Column("boxes"), Column("type"), Column("shape")]
        listed = [[str(t["boxes"]), t["dtype"], str(t["shape"]), n] for n, t in _listed(manifest)]
        lines += ["", *table(columns, "tensor", listed, terminal_width())]
    if manifest.extra:
        lines += ["", f"extra: {', '.join(manifest.extra)}"]
    typer.echo("\n".join(lines))


@app.command()
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read all of a checkpoint and compare checksums; exit 1 if something is corrupt."""
    from shardwise.checkpoint.opening import previous_of, verify_checkpoint

    result = verify_checkpoint(folder)
    earlier = None if result.ok else previous_of(folder)
    if as_json:
        echo(
            {
                "ok": result.ok,
                "boxes": result.num_boxes,
                "without_checksum": result.num_unchecked,
                "bytes": result.bytes_read,
                "problems": list(result.problems),
                "previous": None if earlier is None else str(earlier),
            }
        )
    elif result.ok:
        unchecked = result.num_unchecked
        note = f", {unchecked} of them without checksums" if unchecked else ""
        typer.echo(f"{folder}: ok, {result.num_boxes} boxes{note}, {size(result.bytes_read)} read")
    else:
        typer.echo("\n".join(result.problems))
        if earlier is not None:
            typer.echo(f"  try: the previous checkpoint, {earlier}")
    if not result.ok:
        raise typer.Exit(FAILURE)


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
    section: Section = "model",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, a plain torch file, or for one rank."""
    from shardwise.checkpoint.convert import convert_checkpoint
    from shardwise.checkpoint.files import dtype_named

    kind = None if dtype is None else dtype_named(dtype, "--dtype")
    files = convert_checkpoint(folder, out, to=to, config=config, section=section, dtype=kind)
    if as_json:
        echo({"files": [str(file) for file in files]})
    else:
        typer.echo("\n".join(f"{file}  {size(file.stat().st_size)}" for file in files))


def _to_json(opened: Opened) -> dict[str, Any]:
    manifest = opened.manifest
    return {
        "folder": str(opened.folder),
        "form": "hf" if opened.foreign else "shardwise",
        "step": manifest.step,
        "bytes": manifest.nbytes,
        "files": dict(manifest.files),
        "sections": _totals(manifest),
        "aliases": dict(manifest.aliases),
        "extra": dict(manifest.extra),
    }


def _totals(manifest: Manifest) -> dict[str, dict[str, int]]:
    return {
        section: {
            "tensors": len(tensors),
            "boxes": sum(len(t.boxes) for t in tensors.values()),
            "bytes": sum(t.nbytes for t in tensors.values()),
        }
        for section, tensors in manifest.sections.items()
    }


def _listed(manifest: Manifest) -> list[tuple[str, dict[str, Any]]]:
    from shardwise.checkpoint.manifest import full_name
    from shardwise.dtypes import dtype_name

    return [
        (
            full_name(section, name),
            {"dtype": dtype_name(t.dtype), "shape": list(t.shape), "boxes": len(t.boxes)},
        )
        for section, tensors in manifest.sections.items()
        for name, t in tensors.items()
    ]


def export(
    checkpoint: Folder,
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
    section: Section = "model",
    dtype: Dtype = None,
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
    written = write(
        checkpoint,
        out,
        model=None if loaded is None else loaded.model,
        batch=None if loaded is None else loaded.batch,
        dtype=kind,
        config=config,
        section=section,
    )
    files = [written] if written.is_file() else sorted(written.iterdir())
    lines = [f"{file}  {file.stat().st_size:,} bytes" for file in files]
    echo({"files": [str(file) for file in files]} if as_json else "\n".join(lines))

"""`shardwise checkpoint` and `export`: inspect, verify and convert checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, argument, load_target, option
from shardwise.cli.output import FAILURE, echo, require_own
from shardwise.formatting import Column, size, table, terminal_width

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.open import Checkpoint

app = typer.Typer(no_args_is_help=True, help="Inspect, verify and convert checkpoints.")

Folder = Annotated[Path, argument("CHECKPOINT", "Checkpoint or Hugging Face folder.")]
Section = Annotated[str, option("--section", "Section with the model's weights: model, ema, …")]
Dtype = Annotated[str | None, option("--dtype", "Dtype of floating-point tensors: bfloat16, …")]


@app.command()
def inspect(
    folder: Folder,
    tensors: Annotated[bool, option("--tensors", "List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint without reading its tensors."""
    from shardwise.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(folder)
    manifest = checkpoint.manifest
    if as_json:
        echo(_to_json(checkpoint) | ({"tensors": dict(_tensor_rows(manifest))} if tensors else {}))
        return
    step = "" if manifest.step is None else f", step {manifest.step}"
    kind = "Hugging Face folder" if checkpoint.is_hf else "checkpoint"
    lines = [f"{kind} {checkpoint.folder}{step}: {size(manifest.nbytes)}"]
    lines += [f"{len(manifest.files)} files, {size(sum(manifest.files.values()))}", ""]
    rows = [
        [str(total["tensors"]), str(total["boxes"]), size(total["bytes"]), section]
        for section, total in _totals(manifest).items()
    ]
    columns = [Column("tensors"), Column("boxes"), Column("size")]
    lines += table(columns, "section", rows, terminal_width())
    if tensors:
        columns = [Column("boxes"), Column("type"), Column("shape")]
        tensor_rows = [
            [str(t["boxes"]), t["dtype"], str(t["shape"]), n] for n, t in _tensor_rows(manifest)
        ]
        lines += ["", *table(columns, "tensor", tensor_rows, terminal_width())]
    if manifest.extra:
        lines += ["", f"extra: {', '.join(manifest.extra)}"]
    typer.echo("\n".join(lines))


@app.command()
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read a full checkpoint and compare its checksums; exit 1 if it is corrupt."""
    from shardwise.checkpoint.open import previous_checkpoint, verify_checkpoint

    result = verify_checkpoint(folder)
    previous = None if result.ok else previous_checkpoint(folder)
    if as_json:
        echo(
            {
                "ok": result.ok,
                "boxes": result.num_boxes,
                "without_checksum": result.num_unchecked,
                "bytes": result.bytes_read,
                "problems": list(result.problems),
                "previous": None if previous is None else str(previous),
            }
        )
    elif result.ok:
        unchecked = result.num_unchecked
        note = f", {unchecked} of them without checksums" if unchecked else ""
        typer.echo(f"{folder}: ok, {result.num_boxes} boxes{note}, {size(result.bytes_read)} read")
    else:
        typer.echo("\n".join(result.problems))
        if previous is not None:
            typer.echo(f"  try: the previous checkpoint, {previous}")
    if not result.ok:
        raise typer.Exit(FAILURE)


@app.command()
def convert(
    folder: Folder,
    to: Annotated[str, option("--to", "hf, torch (one file) or shardwise (one rank).")],
    out: Annotated[Path, option("--out -o", "Output folder, or file for --to torch.")],
    config: Annotated[
        Path | None, option("--config", "config.json or its folder, for --to hf.")
    ] = None,
    section: Section = "model",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to a Hugging Face folder, a torch file, or a one-rank checkpoint."""
    from shardwise.checkpoint.convert import convert_checkpoint
    from shardwise.checkpoint.files import dtype_named

    kind = None if dtype is None else dtype_named(dtype, "--dtype")
    files = convert_checkpoint(folder, out, to=to, config=config, section=section, dtype=kind)
    if as_json:
        echo({"files": [str(file) for file in files]})
    else:
        typer.echo("\n".join(f"{file}  {size(file.stat().st_size)}" for file in files))


def _to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "folder": str(checkpoint.folder),
        "form": "hf" if checkpoint.is_hf else "shardwise",
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


def _tensor_rows(manifest: Manifest) -> list[tuple[str, dict[str, Any]]]:
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
        Path, option("--out -o", "Output: a program MODEL.pt2, or a Hugging Face folder.")
    ],
    model: Annotated[
        str | None,
        option("--model", "MODULE.py:FUNCTION returning (model, inputs), for a program."),
    ] = None,
    config: Annotated[
        Path | None, option("--config", "config.json or its folder, for a folder.")
    ] = None,
    section: Section = "model",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Export a trained model for serving, as a torch.export program or Hugging Face folder."""
    from shardwise.checkpoint.files import dtype_named
    from shardwise.checkpoint.write import require_free
    from shardwise.training.export import PROGRAM
    from shardwise.training.export import export as write

    if out.suffix == PROGRAM:
        require_own(out, "program")
        if model is None:
            raise typer.BadParameter(f"{out} needs --model MODULE.py:FUNCTION")
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

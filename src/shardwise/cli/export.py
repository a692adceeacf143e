"""`shardwise export`: a checkpoint as a program or a folder for serving.

Enters: the folder of a checkpoint, and the model's function or config. Leaves: a file or a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.kinds import require_own
from shardwise.cli.target import AsJson, load_target


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
        str, typer.Option("--section", help="What to take as the model: ema, …")
    ] = "model",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of floating-point weights: bfloat16, …")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model for serving: a torch.export program, or a Hugging Face folder."""
    from shardwise.training.checkpoint.types import dtype_named
    from shardwise.training.checkpoint.writing import require_free
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

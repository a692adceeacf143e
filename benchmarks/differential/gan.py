"""Training scripts of a generator and a discriminator, with a step and an optimizer each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

_MODELS = """\
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, {width}), nn.Linear({width}, 6)

    def forward(self, noise):
        return self.second(torch.tanh(self.first(noise)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, {width}), nn.Linear({width}, 1)

    def forward(self, data):
        return self.second(F.leaky_relu(self.first(data), 0.2))


def make():
    return {{"G": Generator(), "D": Discriminator()}}


def d_step(modules, batch):
    real = modules.D(batch["data"])
    fake = modules.D(modules.G(batch["noise"]).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def g_step(modules, batch):
    return F.softplus(-modules.D(modules.G(batch["noise"]))).mean()


STEPS = {{"d": d_step, "g": g_step}}"""

_PLAIN = """\
def plain(notes, rank):
    torch.manual_seed({seed})
    model = nn.ModuleDict(make())
    optimizer = torch.optim.{optimizer}(model.D.parameters(), lr=0.01)
    other = torch.optim.{optimizer}(model.G.parameters(), lr=0.01)
{ready}
    for step, batch in enumerate(batches()):
        for name, chosen in (("d", optimizer), ("g", other)):
            loss = STEPS[name](model, batch)
            loss.backward()
{after}
            chosen.step()
            model.zero_grad()
            notes.loss(loss)
{end}
    notes.state("model", model.state_dict())"""

_PARALLEL = """\
def plan_for(graph):
    return {strategy}


def parallel(notes, rank):
    torch.manual_seed({seed}{rank})
    modules = make()
    example = batches()[0]
    pm = sw.parallelize(modules, example, plan_for, steps=STEPS, timeout_s=30)
    named = dict(pm.named_parameters())
    first = [p for name, p in named.items() if name.startswith("D.")]
    rest = [p for name, p in named.items() if name.startswith("G.")]
    optimizer = sw.optimizer(pm, torch.optim.{optimizer}, [{{"params": first}}], lr=0.01)
    other = sw.optimizer(pm, torch.optim.{optimizer}, [{{"params": rest}}], lr=0.01)
{ready}
    for step, batch in enumerate(batches()):
        for name, chosen in (("d", optimizer), ("g", other)):
            loss = pm.train_step(batch, step=name)
{after}
            chosen.step()
            pm.zero_grad()
            notes.loss(loss)
{end}
    notes.state("model", pm.gather_state_dict())"""


def gan_parts(
    draw: random.Random,
    seed: int,
    strategy: str,
    options: Mapping[str, str],
    slot: Callable[[str, int, str], str],
) -> list[str]:
    """Return the parts of a script: both models with their steps, the batches, both loops."""
    width = draw.choice((4, 6, 9))
    optimizer = draw.choice(("SGD", "Adam", "AdamW"))
    parts = [_MODELS.format(width=width), _batches(draw, seed, options)]
    for side, template in (("plain", _PLAIN), ("parallel", _PARALLEL)):
        text = template.format(
            seed=seed,
            rank=" + rank" if options.get("seed") == "rank" else "",
            optimizer=optimizer,
            strategy=strategy,
            ready=slot("ready", 4, side),
            after=slot("after", 12, side),
            end=slot("end", 8, side),
        )
        lines = [line for line in text.splitlines() if line.strip()]
        parts.append("\n".join(lines).replace("\ndef parallel", "\n\n\ndef parallel"))
    return parts


def _batches(draw: random.Random, seed: int, options: Mapping[str, str]) -> str:
    rows = [draw.choice((4, 6, 7))] * 4
    mark = ""
    if options.get("rows") == "odd":
        rows, mark = [rows[0], 1, draw.choice((2, 3, 5)), rows[0]], "  # odd batches"
    lines = ["def batches():", f"    torch.manual_seed({1000 + seed})", "    made = []"]
    for count in rows:
        fields = f'"data": torch.randn({count}, 6), "noise": torch.randn({count}, 3)'
        lines.append(f"    made.append({{{fields}}}){mark}")
    return "\n".join([*lines, "    return made"])

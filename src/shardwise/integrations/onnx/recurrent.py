"""ONNX's recurrent layers: RNN, GRU and LSTM, as loops over the steps of a sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.integrations.onnx.operators import Call, Value, operator

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "softplus": F.softplus,
    "softsign": F.softsign,
}
State = tuple[Tensor, ...]


@operator("RNN", "GRU", "LSTM")
def recurrent(
    call: Call,
    x: Tensor,
    weights: Tensor,
    recurrences: Tensor,
    biases: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Value = None,
) -> Value:
    """Return the outputs of all steps and the last state, per direction as ONNX arranges them."""
    if peepholes is not None or call.get("clip") or call.get("input_forget", 0):
        raise call.error("peepholes, clipping and input_forget are not supported")
    by_batch = bool(call.get("layout", 0))
    x = x.transpose(0, 1) if by_batch else x  # steps, batch, features
    directions, size = weights.shape[0], call.get("hidden_size")
    valid = None
    if lengths is not None:
        steps = torch.arange(x.shape[0], device=x.device)
        valid = steps[:, None] < lengths
    outputs, states = [], []
    for number in range(directions):
        state = tuple(
            x.new_zeros(x.shape[1], size) if value is None else value.select(int(by_batch), number)
            for value in ((hidden, cell) if call.op == "LSTM" else (hidden,))
        )
        backwards = number == 1 or call.get("direction", "forward") == "reverse"
        bias = None if biases is None else biases[number]
        step = _step(call, number, recurrences[number], bias)
        gates = _GATES[call.op] * size
        inputs = F.linear(x, weights[number], None if bias is None else bias[:gates])
        results = []
        order = range(x.shape[0])
        for at in reversed(order) if backwards else order:
            new = step(inputs[at], state)
            if valid is not None:  # finished sequences keep their state
                new = tuple(
                    torch.where(valid[at][:, None], n, o) for n, o in zip(new, state, strict=True)
                )
            state = new
            output = state[0]
            if valid is not None:
                output = torch.where(valid[at][:, None], output, torch.zeros_like(output))
            results.append(output)
        outputs.append(torch.stack(results[::-1] if backwards else results))
        states.append(state)
    stacked = torch.stack(outputs, 1)  # steps, directions, batch, features
    last = [torch.stack(list(values)) for values in zip(*states, strict=True)]
    if by_batch:
        stacked, last = stacked.permute(2, 0, 1, 3), [value.transpose(0, 1) for value in last]
    return (stacked, *last)


def _step(
    call: Call, number: int, recurrence: Tensor, bias: Tensor | None
) -> Callable[[Tensor, State], State]:
    """Return the function of one step: projected input and state to the new state."""
    size, gates = recurrence.shape[1], recurrence.shape[0]
    names = call.get("activations") or []
    count = len(_DEFAULTS[call.op])
    names = names[number * count : (number + 1) * count] or _DEFAULTS[call.op]
    unknown = [name for name in names if name.lower() not in _FUNCTIONS]
    if unknown:
        raise call.error(f"activation {unknown[0]} is not supported", hint=", ".join(_FUNCTIONS))
    functions: Sequence[Any] = [_FUNCTIONS[name.lower()] for name in names]
    second = None if bias is None else bias[gates:]

    def rnn(projected: Tensor, state: State) -> State:
        return (functions[0](projected + F.linear(state[0], recurrence, second)),)

    def gru(projected: Tensor, state: State) -> State:
        (hidden,) = state
        update, reset, new = torch.split(projected, size, -1)
        if call.get("linear_before_reset", 0):
            own = torch.split(F.linear(hidden, recurrence, second), size, -1)
            u, r = functions[0](update + own[0]), functions[0](reset + own[1])
            candidate = functions[1](new + r * own[2])
        else:
            first = None if second is None else second[: 2 * size]
            own = torch.split(F.linear(hidden, recurrence[: 2 * size], first), size, -1)
            u, r = functions[0](update + own[0]), functions[0](reset + own[1])
            last = None if second is None else second[2 * size :]
            candidate = functions[1](new + F.linear(r * hidden, recurrence[2 * size :], last))
        return ((1 - u) * candidate + u * hidden,)

    def lstm(projected: Tensor, state: State) -> State:
        hidden, cell = state
        total = projected + F.linear(hidden, recurrence, second)
        in_, out, forget, new = torch.split(total, size, -1)
        gate = functions[0]
        cell = gate(forget) * cell + gate(in_) * functions[1](new)
        return gate(out) * functions[2](cell), cell

    return {"RNN": rnn, "GRU": gru, "LSTM": lstm}[call.op]
